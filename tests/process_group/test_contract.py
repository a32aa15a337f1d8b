"""The life cycle that every kind of group has: forming, aborting, failing, forming again."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group import reaper as reaping
from ft_core.process_group.gloo import incarnation
from tests.process_group.ranks import (
    GROUP_TIMEOUT,
    HOST_KINDS,
    Kind,
    Store,
    configure_all,
    formed_groups,
    in_threads,
    set_aside_lost_groups,
    wait_until,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

AT_ONCE_S = 2.0
"""Far below any timeout here (10 s and more). Measured: 1 to 50 ms alone; up to 0.4 s beside the other tests of
scripts/test, at a load of 28 on two cores."""

pytestmark = pytest.mark.parametrize("kind", HOST_KINDS)


def pending(group: Any, numel: int = 1000) -> Work:
    return group.allreduce([torch.ones(numel)])  # type: ignore[no-any-return]


def test_a_group_of_one_needs_no_store(kind: Kind) -> None:
    group = kind()
    group.configure("nowhere.invalid:1/x", "replica0", 0, 1)
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
    assert (group.rank(), group.size()) == (0, 1)
    group.shutdown()


@pytest.mark.parametrize(
    ("store_addr", "rank", "world_size", "complaint"),
    [
        ("127.0.0.1:1/x", 2, 2, "rank=2, world_size=2"),
        ("127.0.0.1:1/x", -1, 2, "rank=-1"),
        ("127.0.0.1:1/x", 0, 0, "world_size=0"),
        ("127.0.0.1/x", 0, 2, "host:port/prefix"),
        ("127.0.0.1:x/x", 0, 2, "host:port/prefix"),
        ("127.0.0.1:99999/x", 0, 2, "host:port/prefix"),
    ],
)
def test_configure_refuses_what_cannot_work(
    kind: Kind, store_addr: str, rank: int, world_size: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        kind().configure(store_addr, "replica0", rank, world_size)


def test_constructor_refuses_what_cannot_work(kind: Kind, store: Store) -> None:
    with pytest.raises(ConfigError, match="timeout="):
        kind(timedelta(0))
    with pytest.raises(ConfigError, match="one of them"):
        kind(hostname="localhost", interface="lo")
    for wrong in (kind(interface="nosuch0"), kind(hostname="203.0.113.77")):
        with pytest.raises(ConfigError, match=r"nosuch0|203\.0\.113\.77"):
            wrong.configure(store.fresh(), "replica0", 0, 1)


def test_the_environment_chooses_the_place(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_INTERFACE", "lo")
    monkeypatch.setenv("FT_HOSTNAME", "203.0.113.77")
    group = kind()
    group.configure("", "replica0", 0, 1)
    group.shutdown()


def test_calls_out_of_order_are_refused(kind: Kind, store: Store) -> None:
    group = kind()
    with pytest.raises(UsageError, match="configure"):
        pending(group)
    group.abort()  # nothing to abort
    assert group.errored() is None
    group.shutdown()
    group.shutdown()
    with pytest.raises(UsageError, match="after shutdown"):
        group.configure(store.fresh(), "replica0", 0, 1)


def test_abort_ends_pending_work_here_and_on_peers(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 3, store) as groups:
        works = [pending(groups[0]), pending(groups[1])]
        begin = time.monotonic()
        groups[2].abort()
        for work in works:
            with pytest.raises(CollectiveError, match="allreduce on the Gloo group of 'replica"):
                work.wait()
        assert time.monotonic() - begin < AT_ONCE_S


def test_after_an_abort_collectives_raise_until_configured_again(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 2, store) as groups:
        work = pending(groups[0])
        groups[0].abort()
        groups[0].abort()
        assert isinstance(groups[0].errored(), CollectiveError)
        with pytest.raises(CollectiveError, match=r"abort\(\) was called"):
            pending(groups[0])
        with pytest.raises(CollectiveError):
            groups[0].barrier()
        configure_all(groups, store.fresh())
        assert [group.errored() for group in groups] == [None, None]
        with pytest.raises(CollectiveError):
            work.wait()  # of the group before: it stays failed, and does not touch the new one
        assert [group.errored() for group in groups] == [None, None]
        in_threads(2, lambda rank: pending(groups[rank]).wait())


def test_a_failure_nobody_waited_for_shows_in_errored(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 2, store) as groups:
        work = pending(groups[0])
        groups[1].abort()
        assert wait_until(lambda: groups[0].errored() is not None)
        assert isinstance(work.exception(), CollectiveError)
        assert not work.is_success()
        assert "failed" in repr(work)


def test_a_failure_shows_in_the_future(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 2, store) as groups:
        future = pending(groups[0]).get_future()
        groups[1].abort()
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            future.wait()
        assert wait_until(lambda: isinstance(groups[0].errored(), CollectiveError))


def test_point_to_point_failures_are_errors_of_the_group(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 2, store) as groups:
        work = groups[0].recv([torch.zeros(2)], 1)
        groups[1].abort()
        with pytest.raises(CollectiveError, match="recv"):
            work.wait()
        assert isinstance(groups[0].errored(), CollectiveError)


def test_collectives_time_out_after_set_timeout(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 2, store) as groups:
        groups[0].set_timeout(timedelta(milliseconds=50))
        begin = time.monotonic()
        with pytest.raises(CollectiveError, match=r"(?i)timed out"):
            pending(groups[0]).wait()
        assert 0.04 < time.monotonic() - begin < AT_ONCE_S
        with pytest.raises(CollectiveError):
            pending(groups[1]).wait()  # learns of it
        assert time.monotonic() - begin < AT_ONCE_S


def test_a_wait_that_runs_out_of_its_own_time_breaks_nothing(kind: Kind, store: Store) -> None:
    with formed_groups(kind, 2, store) as groups:
        work = pending(groups[0])
        with pytest.raises(CollectiveError):
            work.wait(timedelta(milliseconds=10))
        assert groups[0].errored() is None
        pending(groups[1]).wait()
        assert work.wait()


@pytest.mark.parametrize("by", ["wait", "future"])
def test_an_abort_ends_work_also_where_gloo_loses_a_send(kind: Kind, store: Store, by: str) -> None:
    """Gloo's thread writing to the connection in the moment it breaks; without help one of ten waits its timeout."""

    def train(group: Any) -> float:
        try:
            while True:
                work = pending(group)
                _ = work.wait() if by == "wait" else work.get_future().wait()
        except CollectiveError:
            return time.monotonic()
        except RuntimeError:  # what a future raises is the error, but c10d may have made another type of it
            return time.monotonic()

    for turn in range(40):
        with formed_groups(kind, 2, store, timedelta(seconds=10)) as groups, ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(train, group) for group in groups]
            time.sleep(turn % 8 / 8000)  # the moment of the abort, not a synchronisation
            groups[0].abort()
            aborted_at = time.monotonic()
            ends = [futures[0].result(5)]
            if by == "future":
                groups[1].abort()  # nobody waits there, so nobody looks at the connections
            ends.append(futures[1].result(5))
            assert max(ends) - aborted_at < AT_ONCE_S
    set_aside_lost_groups()


def test_abort_ends_a_configure_that_waits_for_a_rank(kind: Kind, store: Store) -> None:
    group = kind(GROUP_TIMEOUT)
    address = store.fresh()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(group.configure, address, "replica0", 0, 2)
        assert wait_until(lambda: store.server.check([f"{address.partition('/')[2]}/records"]))
        begin = time.monotonic()
        group.abort()
        with pytest.raises(CollectiveError, match=r"abort\(\) was called"):
            future.result(5)
        assert time.monotonic() - begin < AT_ONCE_S
    with pytest.raises(CollectiveError):
        pending(group)
    others = [group, kind(GROUP_TIMEOUT)]
    configure_all(others, store.fresh())
    in_threads(2, lambda rank: pending(others[rank]).wait())
    for each in others:
        each.shutdown()
    assert reaping.gloo.wait_empty(5)


@pytest.mark.parametrize("end", ["configure", "shutdown"])
def test_a_later_call_wins_over_a_configure_in_progress(kind: Kind, store: Store, end: str) -> None:
    group = kind(GROUP_TIMEOUT)
    address = store.fresh()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(group.configure, address, "replica0", 0, 2)
        assert wait_until(lambda: store.server.check([f"{address.partition('/')[2]}/records"]))
        if end == "configure":
            group.configure("", "replica0", 0, 1)
        else:
            group.shutdown()
        with pytest.raises(CollectiveError, match=rf"{end}\(\) was called"):
            future.result(5)
    if end == "configure":
        pending(group).wait()
    group.shutdown()


def test_ranks_that_do_not_agree_are_told(kind: Kind, store: Store) -> None:
    address = store.fresh()
    groups = [kind(GROUP_TIMEOUT) for _ in range(2)]

    def configure(rank: int) -> str:
        try:
            groups[rank].configure(address, f"replica{rank}", rank, 2 + rank)
        except CollectiveError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(configure, rank) for rank in range(2)]
        assert "configures a group of 3 ranks" in futures[0].result(5)
        groups[1].abort()  # waits for a third
        futures[1].result(5)


def test_garbage_in_the_store_is_told(kind: Kind, store: Store) -> None:
    address = store.fresh()
    store.server.set(f"{address.partition('/')[2]}/records", "garbage")
    with pytest.raises(CollectiveError, match="not our records"):
        kind(GROUP_TIMEOUT).configure(address, "replica0", 0, 2)


def test_forming_times_out_and_says_for_what(kind: Kind, store: Store) -> None:
    with pytest.raises(CollectiveError, match="did not form in time: rank 1 did not come"):
        kind(timedelta(seconds=1)).configure(store.fresh(), "replica0", 0, 2)


def test_threads_that_abort_and_configure_at_once_do_no_harm(
    kind: Kind, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything against everything; ends usable. Fewer turns than groups that may be stuck forming (MAX_FORMING).

    Short limits: constructors that are abandoned, and works that Gloo loses (see above), last until theirs.
    """
    monkeypatch.setattr(incarnation, "MAX_CONNECT_S", 0.5)
    groups = [kind(timedelta(seconds=2)) for _ in range(2)]
    stop = threading.Event()

    def disturb(rank: int) -> None:
        while not stop.wait(random.random() / 50):
            groups[rank].abort()

    def train(address: str, rank: int) -> None:
        try:
            groups[rank].configure(address, f"replica{rank}", rank, 2)
            for _ in range(20):
                pending(groups[rank]).wait()
        except (CollectiveError, UsageError):
            groups[rank].abort()

    disturbers = [threading.Thread(target=disturb, args=(rank,)) for rank in range(2)]
    for thread in disturbers:
        thread.start()
    for _ in range(20):
        in_threads(2, partial(train, store.fresh()))
    stop.set()
    for thread in disturbers:
        thread.join()
    monkeypatch.undo()
    for group in groups:
        group.set_timeout(GROUP_TIMEOUT)
    configure_all(groups, store.fresh())
    in_threads(2, lambda rank: pending(groups[rank]).wait())
    for group in groups:
        group.shutdown()
    assert reaping.gloo.wait_empty(5)
