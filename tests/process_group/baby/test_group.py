"""What a group in a child process adds to the contract: memory, the child's end in every way, nothing left behind."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.backends import TorchBuild
from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group import ProcessGroupBabyAccelerator, ProcessGroupBabyGloo, ProcessGroupBabyNCCL, availability
from ft_core.process_group import ProcessGroupBabyXCCL as Xccl
from ft_core.process_group.baby import child, incarnation
from ft_core.process_group.baby import children as processes
from ft_core.process_group.baby.descriptors import readable
from ft_core.process_group.peer_ends import PeerEnds
from tests.process_group.ranks import (
    AT_ONCE_S,
    GROUP_TIMEOUT,
    Store,
    configure_all,
    formed_groups,
    in_threads,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Groups = list[ProcessGroupBabyGloo]


@pytest.fixture
def groups(store: Store) -> Iterator[Groups]:
    with formed_groups(ProcessGroupBabyGloo, 2, store) as formed:
        yield formed


def pid_of(group: ProcessGroupBabyGloo) -> int:
    assert group._incarnation is not None
    assert group._incarnation.child is not None
    assert group._incarnation.child.pid is not None
    return group._incarnation.child.pid


def helper_pid() -> int:
    assert processes.children._process is not None
    return processes.children._process.pid


def is_gone(pid: int) -> bool:
    """Not even a zombie is left."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def state(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def sums(groups: Groups, make: Callable[[int], torch.Tensor] = lambda rank: torch.ones(1000)) -> list[torch.Tensor]:
    tensors = [make(rank) for rank in range(len(groups))]
    in_threads(len(groups), lambda rank: groups[rank].allreduce([tensors[rank]]).wait())
    return tensors


def test_repr_tells_the_state(store: Store) -> None:
    group = ProcessGroupBabyGloo()
    assert repr(group) == "ProcessGroupBabyGloo(unconfigured)"
    group.configure("", "replica0", 0, 1)
    assert repr(group) == f"ProcessGroupBabyGloo(rank 0 of 1, ready, in process {pid_of(group)}, 0 in flight)"
    group.abort()
    assert repr(group).startswith("ProcessGroupBabyGloo(rank 0 of 1, aborted: abort() was called")
    group.shutdown()
    assert repr(group) == "ProcessGroupBabyGloo(shut down)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("kind", [ProcessGroupBabyNCCL, ProcessGroupBabyAccelerator])
def test_without_a_gpu_a_group_for_gpus_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{kind.__name__}: (torch|no GPU) .*; or use ProcessGroupGloo,"):
        kind(timedelta(seconds=1))


@pytest.mark.parametrize("kind", [ProcessGroupBabyNCCL, ProcessGroupBabyAccelerator])
def test_an_nccl_that_is_too_old_is_refused_at_once_and_not_by_each_child(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TorchBuild("2.6.0", cuda="12.4", nccl=True, cuda_devices=1)
    monkeypatch.setattr(availability, "torch_build", lambda: build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5))
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}: NCCL 2\.21\.5 is too old.*2\.25 or newer"):
        kind()


def test_what_torch_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot map an Intel GPU's memory"):
        Xccl()


def test_it_is_refused_where_the_system_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SUPPORTED", False)
    with pytest.raises(ConfigError, match="pidfd_open"):
        ProcessGroupBabyGloo()


# ----------------------------------------------------------------------------------------------------------- in flight

MANY = child.MAX_WAITING + 50
"""More than threads wait for in the child."""


def test_more_messages_than_threads_wait_for_all_arrive(groups: Groups) -> None:
    """Received before any is sent, and sent before any is waited for: those beyond the threads are under way, too."""
    received = [torch.zeros(3) for _ in range(MANY)]
    receives = [groups[1].recv([tensor], 0, tag) for tag, tensor in enumerate(received)]
    sums(groups)  # so the child has launched them
    sends = [groups[0].send([torch.full((3,), float(tag))], 1, tag) for tag in reversed(range(MANY))]
    for work in (*sends, *receives):
        work.wait()
    assert [tensor.tolist() for tensor in received] == [[float(tag)] * 3 for tag in range(MANY)]
    assert [tensor.tolist() for tensor in sums(groups)] == [[2.0] * 1000] * 2


def test_a_message_may_take_as_long_as_the_groups_timeout(store: Store) -> None:
    """Gloo's own limit, where none is said, is the one of its connections: a fifth of it."""
    with formed_groups(ProcessGroupBabyGloo, 2, store, timedelta(seconds=5)) as groups:
        received = torch.zeros(1)
        work = groups[1].recv([received], 0, 7)
        with pytest.raises(CollectiveError, match=r"1\.5 s of waiting are over"):
            work.wait(timedelta(seconds=1.5))
        groups[0].send([torch.ones(1)], 1, 7).wait()
        work.wait()
        assert received.tolist() == [1.0]


def test_one_collective_too_many_is_refused_and_costs_nothing(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "MAX_IN_FLIGHT", 3)
    shared = torch.ones(1000).share_memory_()
    receives = [groups[1].recv([torch.zeros(1)], 0, tag) for tag in range(3)]
    for one_more in (shared, torch.ones(1000)):
        with pytest.raises(UsageError, match=r"3 collectives are in flight on .*: wait for some of them, then launch"):
            groups[1].allreduce([one_more])
    for tag, work in enumerate(receives):
        groups[0].send([torch.ones(1)], 1, tag).wait()
        work.wait()
    assert groups[1].errored() is None
    tensors = [torch.ones(1000), shared]
    assert [tensor.tolist() for tensor in sums(groups, tensors.__getitem__)] == [[2.0] * 1000] * 2


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "make",
    [
        lambda _: torch.ones(6)[::2],
        lambda _: torch.ones(2, 3).t(),
        lambda _: torch.tensor(1.0),
        lambda _: torch.ones(0),
        lambda _: torch.ones(5, dtype=torch.int8),
        lambda _: torch.ones(5, dtype=torch.float64),
        lambda _: torch.ones(5, dtype=torch.bfloat16),
        lambda _: torch.ones(5, requires_grad=True),
        lambda _: torch.ones(3_000_001),
        lambda _: torch.ones(1000).share_memory_()[1::3],
    ],
    ids=["stride", "transposed", "scalar", "empty", "int8", "float64", "bfloat16", "leaf", "large", "shared slice"],
)
def test_tensors_of_every_kind_are_reduced_in_place(groups: Groups, make: Callable[[int], torch.Tensor]) -> None:
    for tensor in sums(groups, make):
        assert torch.equal(tensor.detach(), torch.full_like(tensor, 2).detach())


def test_what_lies_in_shared_memory_is_not_copied(groups: Groups) -> None:
    shared = [torch.ones(1000).share_memory_() for _ in groups]
    for turn in range(3):  # the first time its handle goes along, then its number
        for tensor in sums(groups, lambda rank: shared[rank]):
            assert tensor.tolist() == [2.0 ** (turn + 1)] * 1000
    assert [group._pool.idle_bytes for group in groups] == [0, 0]
    sums(groups)
    assert all(group._pool.idle_bytes > 0 for group in groups)


def test_shared_memory_at_the_address_of_older_one_is_other_memory(groups: Groups) -> None:
    for turn in range(20):
        tensors = [torch.full((5000,), float(turn)).share_memory_() for _ in groups]
        for tensor in sums(groups, tensors.__getitem__):
            assert tensor.tolist() == [2.0 * turn] * 5000
        del tensor, tensors
        gc.collect()


def test_memory_is_used_again_and_not_more_of_it_each_step(groups: Groups) -> None:
    kept = []
    for _ in range(5):
        works = [[group.allreduce([torch.ones(50_000)]) for group in groups] for _ in range(3)]
        for step in works:
            for work in step:
                work.wait()
        kept.append(groups[0]._pool.idle_bytes)
    assert max(kept) <= 3 * 2**18  # each of three in flight at once: 200 KB


def test_what_is_worked_on_in_place_fails_when_the_child_is_dead(groups: Groups) -> None:
    """Until then it may write to the tensor; who only has copies fails at once, dead or not."""
    child = groups[0]._incarnation
    assert child is not None
    assert child.child is not None
    copied = groups[0].recv([torch.zeros(1000)], 1)
    in_place = groups[0].recv([torch.zeros(1000).share_memory_()], 1)
    pidfd = os.dup(child.child.pidfd)
    try:
        dead: list[bool] = []
        in_place.get_future().add_done_callback(lambda _: dead.append(readable(pidfd, 0)))
        groups[0].abort()
        for work in (copied, in_place):
            with pytest.raises(CollectiveError, match=r"recv on .* failed: abort\(\) was called"):
                work.wait()
        assert wait_until(lambda: dead == [True])
    finally:
        os.close(pidfd)


def test_the_next_group_waits_until_the_child_before_is_dead(
    groups: Groups, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it may write to a tensor that nobody waits for. A group that is given up meanwhile hands it on."""
    first, pid = groups[0]._incarnation, pid_of(groups[0])
    assert first is not None
    monkeypatch.setattr(first.child, "kill", lambda: None)  # as where a driver holds it
    errors: list[Exception] = []

    def configure() -> None:
        try:
            groups[0].configure(store.fresh(), "replica0", 0, 1)
        except CollectiveError as error:
            errors.append(error)

    given_up, waits = (threading.Thread(target=configure, daemon=True) for _ in range(2))
    given_up.start()
    assert wait_until(lambda: groups[0]._incarnation is not first and "ready" in repr(groups[0]))
    assert given_up.is_alive()
    groups[0].abort()
    given_up.join(10)
    assert len(errors) == 1
    waits.start()
    assert wait_until(lambda: "ready" in repr(groups[0]))
    assert waits.is_alive()
    os.kill(pid, signal.SIGKILL)
    waits.join(10)
    assert not waits.is_alive()
    assert len(errors) == 1
    groups[0].allreduce([torch.ones(2)]).wait()


def test_after_an_abort_nothing_is_written_to_the_tensor(groups: Groups, store: Store) -> None:
    for turn in range(10):
        tensors = [torch.ones(200_000) for _ in groups]
        works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
        time.sleep(turn / 5000)  # the moment of the abort, not a synchronisation
        for group in groups:
            group.abort()
        for work, tensor in zip(works, tensors, strict=True):
            try:
                work.wait()
                assert tensor.unique().tolist() == [2.0]
            except CollectiveError:
                assert tensor.unique().tolist() == [1.0]
        configure_all(groups, store.fresh())


def test_sparse_tensors_are_refused_and_break_nothing(groups: Groups) -> None:
    with pytest.raises(ConfigError, match="takes dense ones"):
        groups[0].allreduce([torch.eye(3).to_sparse()])
    assert groups[0].errored() is None
    sums(groups)


# --------------------------------------------------------------------------------------------------- the child's end


def test_a_child_that_is_killed_from_outside_is_named_and_replaced(groups: Groups, store: Store) -> None:
    work = groups[0].allreduce([torch.ones(10)])
    other = groups[1].recv([torch.ones(10)], 0)
    killed = pid_of(groups[0])
    begin = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(CollectiveError, match=rf"child process {killed} was killed by SIGKILL"):
        work.wait()
    assert f"child process {killed} was killed by SIGKILL" in str(groups[0].errored())
    with pytest.raises(CollectiveError, match="was killed by SIGKILL"):
        groups[0].allreduce([torch.ones(10)])
    with pytest.raises(CollectiveError):
        other.wait()  # the peer learns of it
    assert time.monotonic() - begin < AT_ONCE_S
    configure_all(groups, store.fresh())
    assert [group.errored() for group in groups] == [None, None]
    assert pid_of(groups[0]) != killed
    sums(groups)


def test_a_child_that_ends_by_itself_is_named(groups: Groups) -> None:
    """By a crash, as of a driver: nobody waits for anything at that moment."""
    os.kill(pid_of(groups[1]), signal.SIGSEGV)
    assert wait_until(lambda: groups[1].errored() is not None)
    assert "was killed by SIGSEGV" in str(groups[1].errored())


@pytest.mark.parametrize("by", ["wait", "future"])
def test_an_abort_does_not_need_the_child_to_run(groups: Groups, store: Store, by: str) -> None:
    work, other = [group.recv([torch.ones(10)], 1 - rank) for rank, group in enumerate(groups)]
    frozen = pid_of(groups[0])
    os.kill(frozen, signal.SIGSTOP)
    begin = time.monotonic()
    groups[0].abort()
    assert time.monotonic() - begin < AT_ONCE_S  # what waits for a child waits GRACE_S or DEATH_WAIT_S, 5 s
    for each in (work, other):
        with pytest.raises((CollectiveError, RuntimeError)):
            _ = each.wait() if by == "wait" else each.get_future().wait()
    assert time.monotonic() - begin < AT_ONCE_S
    assert wait_until(lambda: is_gone(frozen))
    configure_all(groups, store.fresh())
    sums(groups)


def test_a_frozen_child_is_a_collective_that_times_out(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "GRACE_S", 0.2)
    groups[0].set_timeout(timedelta(seconds=0.2))
    frozen = pid_of(groups[0])
    os.kill(frozen, signal.SIGSTOP)
    work = groups[0].allreduce([torch.ones(10)])
    with pytest.raises(CollectiveError, match=rf"child process {frozen} does not answer \(is it stopped\?\)"):
        work.wait()
    assert wait_until(lambda: is_gone(frozen))


def test_a_frozen_child_does_not_block_who_launches_for_ever(groups: Groups) -> None:
    """The channel is full at some moment: an abort from another thread ends the wait."""
    os.kill(pid_of(groups[0]), signal.SIGSTOP)
    aborting = threading.Timer(0.3, groups[0].abort)
    aborting.start()
    begin = time.monotonic()

    def launch_for_ever() -> None:
        while True:
            groups[0].broadcast([torch.ones(1) for _ in range(200)])

    with pytest.raises(CollectiveError):
        launch_for_ever()
    assert time.monotonic() - begin < AT_ONCE_S
    aborting.join()


def test_the_process_that_starts_children_may_die(groups: Groups, store: Store) -> None:
    dead = helper_pid()
    os.kill(dead, signal.SIGKILL)
    assert wait_until(lambda: all(group.errored() is not None for group in groups))
    assert wait_until(lambda: is_gone(dead))
    spare = processes.children._spare  # dies with it, a moment later; who takes it in that moment asks again
    assert wait_until(lambda: spare is None or spare.channel.has_ended())
    configure_all(groups, store.fresh())
    assert helper_pid() != dead
    sums(groups)


def test_children_are_waited_for(groups: Groups, store: Store) -> None:
    pids = []
    for _ in range(5):
        pids += [pid_of(group) for group in groups]
        configure_all(groups, store.fresh())
    assert len(set(pids)) == len(pids)
    assert wait_until(lambda: all(is_gone(pid) for pid in pids))
    last = [pid_of(group) for group in groups]
    for group in groups:
        group.shutdown()
    assert wait_until(lambda: all(is_gone(pid) for pid in last))


def test_a_dropped_groups_child_is_killed(store: Store) -> None:
    group = ProcessGroupBabyGloo()
    group.configure("", "replica0", 0, 1)
    pid = pid_of(group)
    del group
    assert wait_until(lambda: is_gone(pid))


def test_reconfiguring_leaks_no_descriptors_and_no_threads(groups: Groups, store: Store) -> None:
    def counts() -> tuple[int, int]:
        """Without those of memory kept for later: one, or two where a broken-off collective had one."""
        kept = sum(2 * len(group._pool._idle) for group in groups)
        return len(os.listdir("/proc/self/fd")) - kept, len(os.listdir("/proc/self/task"))

    def turn(number: int) -> None:
        if number % 3 == 0:
            groups[number % 2].allreduce([torch.ones(10)])
        if number % 5 == 0:
            groups[0].abort()
        configure_all(groups, store.fresh())
        sums(groups)

    turn(0)
    before = counts()
    for number in range(20):
        turn(number)
    assert wait_until(lambda: all(now <= was for now, was in zip(counts(), before, strict=True)))


# ------------------------------------------------------------------------------------------------------- surroundings


def test_signals_of_the_terminal_are_left_to_the_parent(groups: Groups) -> None:
    for pid in (helper_pid(), *(pid_of(group) for group in groups)):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(pid, number)
    sums(groups)
    assert [group.errored() for group in groups] == [None, None]


def test_the_child_takes_one_thread_and_no_input(groups: Groups) -> None:
    pid = pid_of(groups[0])
    environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=1" in environment
    assert pathlib.Path(f"/proc/{pid}/fd/0").readlink() == pathlib.Path(os.devnull)
    for number in (1, 2):
        mine = pathlib.Path(f"/proc/self/fd/{number}").readlink()
        assert pathlib.Path(f"/proc/{helper_pid()}/fd/{number}").exists()
        assert mine is not None


def test_what_the_child_is_connected_with_is_known_here(groups: Groups) -> None:
    """For the witness, which ends them when this process is killed, and for the watch on peers' ends."""
    fds = groups[0].connection_fds()
    assert len(fds) == 1
    assert not os.get_inheritable(fds[0])
    ended = threading.Event()
    watch = PeerEnds("test", lambda _number: ended.set())
    try:
        watch.watch(1, fds)
        groups[1].abort()
        assert ended.wait(5)
    finally:
        watch.stop()
    groups[0].abort()
    assert groups[0].connection_fds() == []


@pytest.mark.forks
def test_a_forked_process_leaves_the_group_alone(groups: Groups) -> None:
    """As a DataLoader's worker: it holds a copy of everything, uses nothing, and ends."""
    work = groups[0].allreduce([torch.ones(10)])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = b"?"
        try:
            groups[0].abort()
            open_fds = [fd for group in groups for fd in group.connection_fds()]
            try:
                work.wait()
            except CollectiveError as error:
                report = b"refused" if "was forked from" in str(error) and not open_fds else b"not refused"
            for group in groups:
                group.shutdown()
        finally:
            os.write(write, report)
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"refused"
    os.close(read)
    os.waitpid(pid, 0)
    groups[1].allreduce([torch.ones(10)]).wait()
    assert work.wait()
    sums(groups)


def test_nothing_is_formed_while_the_process_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ProcessGroupBabyGloo(GROUP_TIMEOUT)
    monkeypatch.setattr(processes, "children", processes.Children())
    processes.children.stop()
    with pytest.raises(RuntimeError, match="the process is exiting"):
        group.configure("", "replica0", 0, 1)
