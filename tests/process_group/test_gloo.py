"""The life cycle of a ProcessGroupGloo: forming, aborting, failing, forming again."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo
from torch._C._distributed_c10d import Store as TorchStore
from torch._C._distributed_c10d import Work

from ft_core.errors import CollectiveError, ConfigError, PeerError
from ft_core.process_group import ProcessGroupGloo, rendezvous, socket_table
from ft_core.process_group import reaper as reaping
from ft_core.process_group import store_pool as stores
from ft_core.process_group.gloo import connections, incarnation
from tests.process_group.ranks import (
    AT_ONCE_S,
    GROUP_TIMEOUT,
    Store,
    configure_all,
    gloo_groups,
    in_threads,
    wait_until,
)


def mine(group: ProcessGroupGloo) -> incarnation.Incarnation:
    assert group._incarnation is not None
    return group._incarnation


def pending(group: ProcessGroupGloo, numel: int = 1000) -> Work:
    return group.allreduce([torch.ones(numel)])


def test_repr_tells_the_state(store: Store) -> None:
    group = ProcessGroupGloo()
    assert repr(group) == "ProcessGroupGloo(unconfigured)"
    group.configure("", "replica0", 0, 1)
    assert repr(group).startswith("ProcessGroupGloo(rank 0 of 1, ready, at 127.0.0.1:")
    assert repr(group).endswith(", 0 in flight)")
    group.abort()
    assert repr(group).startswith("ProcessGroupGloo(rank 0 of 1, aborted: abort() was called")
    group.shutdown()
    assert repr(group) == "ProcessGroupGloo(shut down)"


def apart() -> torch.Tensor:
    return torch.arange(4.0)[::2]


def packed() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("allreduce", ([apart()],)),
        ("broadcast", ([apart()],)),
        ("reduce", ([apart()],)),
        ("reduce_scatter", ([apart()], [[packed()]])),
        ("scatter", ([apart()], [[packed()]])),
        ("scatter", ([packed()], [[apart()]])),
        ("alltoall_base", (apart(), packed())),
        ("send", ([apart()], 0)),
        ("recv", ([apart()], 0)),
        ("allreduce", ([torch.ones(1).expand(1 << 20)],)),
    ],
)
def test_a_tensor_that_gloo_would_take_for_its_neighbours_is_refused(name: str, arguments: tuple[object, ...]) -> None:
    group = ProcessGroupGloo()
    group.configure("", "replica0", 0, 1)
    with pytest.raises(ConfigError, match=f"{name}: a tensor of shape .* is not contiguous in memory"):
        getattr(group, name)(*arguments)
    with pytest.raises(ConfigError, match=r"broadcast: Gloo carries no tensors of torch\.uint16; .*float32"):
        group.broadcast([torch.ones(2, dtype=torch.uint16)])
    outputs = [[apart()]]
    group.allgather(outputs, [torch.tensor([5.0, 7.0])]).wait()  # torch copies these
    assert outputs[0][0].tolist() == [5.0, 7.0]
    group.allreduce([torch.ones(2, 3).t()]).wait()
    assert group.errored() is None
    group.shutdown()


@pytest.mark.parametrize("where", [{"hostname": "127.0.0.1"}, {"interface": "lo"}])
def test_the_place_to_listen_can_be_chosen(store: Store, where: dict[str, str]) -> None:
    groups = [ProcessGroupGloo(GROUP_TIMEOUT, **where) for _ in range(2)]
    configure_all([groups[0], groups[1].sibling()], store.fresh())
    assert "at 127.0.0.1:" in repr(groups[0])
    groups[0].shutdown()


# ------------------------------------------------------------------------------------------------------------- forming


def test_a_port_that_a_peer_gave_back_may_be_anybodys(store: Store) -> None:
    """Found by a lost step: what waited for its end (a work lost as above) kept ending connections on a reused port."""
    with gloo_groups(2, store) as (ours, theirs):
        old = mine(ours)
        assert old.connections.rendezvous is not None
        (peer,) = old.connections.rendezvous.peers
        theirs.shutdown()
        assert wait_until(lambda: peer not in [local for _, local in socket_table.listeners()])
        with (
            socket.create_server((peer.host, peer.port)) as server,
            socket.create_connection((peer.host, peer.port), 5) as one,
            server.accept()[0] as other,
        ):
            old.connections.end()
            one.sendall(b"?")
            assert other.recv(1) == b"?"


def test_a_duplicate_that_another_thread_has_for_a_moment_is_no_connection(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by steps that were lost now and then: the end of such a duplicate passed for that of the connection."""
    settle = connections.GroupConnections.settle

    def settle_meanwhile(group: connections.GroupConnections) -> None:
        copies = [os.dup(fd) for fd in socket_table.connections(group.is_mine)]
        settle(group)
        for fd in copies:
            os.close(fd)

    monkeypatch.setattr(connections.GroupConnections, "settle", settle_meanwhile)
    with gloo_groups(3, store) as groups:
        assert [mine(group).connections.any_lost() for group in groups] == [False] * 3
        in_threads(3, lambda rank: groups[rank].allreduce([torch.ones(1000)]).wait())
        assert [group.errored() for group in groups] == [None] * 3


def test_a_rank_that_died_after_publishing_does_not_hold_up_an_abort(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo is inside its constructor then, waiting for a connection that will not come, and cannot be interrupted."""
    monkeypatch.setattr(incarnation, "MAX_CONNECT_S", 0.5)  # what stays behind in the constructor, and for how long
    address = store.fresh()

    class DyingStore(rendezvous.RendezvousStore):
        def _exchange(self, rank: int, blob: bytes, store: TorchStore) -> None:
            self._publish(rank, blob, store)
            raise CollectiveError("died here")

    dying = DyingStore(store.server, address.partition("/")[2], "dead", 2, lambda: None)
    options = TorchGloo._Options()  # type: ignore[attr-defined]
    options._devices = [TorchGloo.create_device(hostname="127.0.0.1")]
    with pytest.raises(CollectiveError, match="died here"):
        TorchGloo(dying, 1, 2, options)
    del options

    group = ProcessGroupGloo(GROUP_TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(group.configure, address, "replica0", 0, 2)
        # The pool's thread may not have begun to configure when this looks for the first time.
        assert wait_until(
            lambda: bool(group._incarnation and getattr(group._incarnation.connections.rendezvous, "peers", None))
        )
        group.abort()
        begin = time.monotonic()
        with pytest.raises(PeerError):
            future.result(5)
        assert time.monotonic() - begin < AT_ONCE_S
        # Gloo multiplies the timeout it is given: the thread that waits in it must not stay for that long.
        assert wait_until(lambda: not any(thread.name == "ft-gloo-form" for thread in threading.enumerate()))
        assert time.monotonic() - begin < AT_ONCE_S
    group.configure("", "replica0", 0, 1)
    pending(group).wait()
    group.shutdown()


def test_reconfiguring_leaks_no_descriptors_and_no_threads(store: Store) -> None:
    def counts() -> tuple[int, int]:
        assert reaping.gloo.wait_empty(5)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    live_before = set(incarnation._live)
    with gloo_groups(2, store) as groups:
        configure_all(groups, store.fresh())
        before = counts()
        for turn in range(50):
            if turn % 3 == 0:
                pending(groups[turn % 2])
            if turn % 5 == 0:
                groups[0].abort()
            configure_all(groups, store.fresh())
        in_threads(2, lambda rank: pending(groups[rank]).wait())
        # Threads of Gloo take a moment to be gone from /proc after they are joined.
        assert wait_until(lambda: all(now <= was for now, was in zip(counts(), before, strict=True)))
    assert reaping.gloo.wait_empty(5)
    assert incarnation._live <= live_before


def test_a_dropped_group_is_destroyed_in_the_background(store: Store) -> None:
    groups = [ProcessGroupGloo(GROUP_TIMEOUT) for _ in range(2)]
    configure_all(groups, store.fresh())
    dropped = mine(groups[0])
    work = pending(groups[1])
    groups.pop(0)
    with pytest.raises(CollectiveError):
        work.wait()
    assert wait_until(lambda: dropped not in incarnation._live)
    groups[0].shutdown()


def test_without_known_sockets_it_warns_and_works(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_table, "SUPPORTED", False)
    monkeypatch.setattr(connections, "_warned_cannot_end", False)
    stores.pool.clear()
    with gloo_groups(2, store, timedelta(milliseconds=300)) as groups:
        in_threads(2, lambda rank: pending(groups[rank]).wait())
        work = pending(groups[0])
        groups[0].abort()
        with pytest.raises(CollectiveError):
            pending(groups[0])
        with pytest.raises(CollectiveError, match=r"(?i)timed out"):
            work.wait()
    assert [record.message for record in caplog.records if "cannot be found" in record.message]
    stores.pool.clear()


@pytest.mark.parametrize(
    ("named_after_s", "says"), [(60.0, "who is there was not known yet"), (0.0, "rank 1 did not come")]
)
def test_what_it_waits_for_is_true_at_whatever_moment_its_time_is_up(
    store: Store, monkeypatch: pytest.MonkeyPatch, named_after_s: float, says: str
) -> None:
    """On a loaded machine that may be before its first question, or in one and the same turn as the look."""
    monkeypatch.setattr(rendezvous, "NAMED_AFTER_S", named_after_s)
    said: list[str] = []

    def checkpoint() -> None:
        said.append(exchange.missing)
        if len(said) == 2:  # the first is before anything is written
            raise CollectiveError("time is up")

    prefix = store.fresh().partition("/")[2]
    exchange = rendezvous.RendezvousStore(store.server, prefix, "replica0", 2, checkpoint)
    with pytest.raises(CollectiveError, match="time is up"):
        exchange.set("rank/0", b"blob")
    assert said == ["who is there was not known yet", says]


@pytest.mark.parametrize("name", ["recv", "recv_anysource", "send", "reduce_scatter"])
def test_what_only_a_wait_sees_the_end_of_has_the_groups_timeout(store: Store, name: str) -> None:
    """Gloo's own limit, where none is said, is the one of its connections: at most a second."""
    with gloo_groups(2, store, timedelta(seconds=20)) as groups:
        there, large = threading.Event(), torch.zeros(4_000_000)

        def do(rank: int) -> None:
            group: ProcessGroupGloo = groups[rank]
            if rank == 1:
                there.wait(1.3)
            if name == "reduce_scatter":
                group.reduce_scatter([torch.zeros(2)], [[torch.ones(2)] * 2]).wait()
            elif (name == "send") == (rank == 0):
                group.send([large], 1 - rank, 7).wait()
            elif name == "recv_anysource":
                group.recv_anysource([large], 7).wait()
            else:
                group.recv([large], 1 - rank, 7).wait()

        in_threads(2, do)
        assert [group.errored() for group in groups] == [None, None]
