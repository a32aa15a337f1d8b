"""Groups of devices over the fake: what only they have. What all have: test_life_cycle.py, test_collectives.py."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import AllreduceOptions

from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group import ProcessGroupGloo, ProcessGroupWrapper
from ft_core.process_group.device import incarnation as incarnations
from ft_core.process_group.device.host import ProcessHost
from ft_core.process_group.device.phases import Phase
from tests.process_group.fake_communicator import GARBAGE, Behaviour, FakeNCCL, FakeOfOne, note_waits
from tests.process_group.ranks import AT_ONCE_S, Store, configure_all, in_threads, nothing_is_left, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def groups(store: Store) -> Iterator[list[FakeNCCL]]:
    made = [FakeNCCL(TIMEOUT) for _ in range(2)]
    configure_all(made, store.fresh())
    yield made
    for group in made:
        group.shutdown()
    assert nothing_is_left()


def launch(group: FakeNCCL) -> Any:
    return group.allreduce([torch.ones(4)])


def in_vain(configure: Callable[..., object], *arguments: Any) -> None:
    """Another configure is going to win."""
    with pytest.raises(CollectiveError):
        configure(*arguments)


def test_repr_tells_the_state(groups: list[FakeNCCL]) -> None:
    alone = FakeNCCL(TIMEOUT)
    assert repr(alone) == "FakeNCCL(unconfigured, cpu)"
    with pytest.raises(UsageError, match="configure\\(\\) it first"):
        launch(alone)
    launch(groups[0])
    assert repr(groups[0]) == "FakeNCCL(rank 0 of 2, ready, cpu, 1 in flight)"
    groups[0].abort()
    assert wait_until(lambda: repr(groups[0]).startswith("FakeNCCL(rank 0 of 2, aborted: abort() was called"))
    alone.shutdown()
    assert repr(alone) == "FakeNCCL(shut down)"
    with pytest.raises(UsageError, match="make a new FakeNCCL"):
        alone.configure("", "r", 0, 1)


def test_it_says_what_it_is(groups: list[FakeNCCL]) -> None:
    group = groups[0]
    assert (group.getBackendName(), group.torch_backend) == ("ft-nccl", "nccl")
    assert (group.blocks_host, group.carries_cpu_memory, group.connection_fds()) == (False, False, [])
    assert ProcessGroupWrapper(group).blocks_host is False
    assert (ProcessGroupGloo().blocks_host, ProcessGroupGloo().carries_cpu_memory) == (True, True)
    sibling = group.sibling()
    assert (type(sibling), sibling.device, sibling.size()) == (FakeNCCL, group.device, 0)


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("abort_s", [0.0, -1.0, float("inf"), float("nan")])
def test_the_time_of_an_abort_has_to_be_one(abort_s: float) -> None:
    with pytest.raises(ConfigError, match="abort_s="):
        FakeNCCL(TIMEOUT, abort_s=abort_s)


def test_a_timeout_has_to_be_one() -> None:
    with pytest.raises(ConfigError, match="timeout="):
        FakeNCCL(timedelta(0))


def test_tensors_on_another_device_are_refused_before_anything_is_launched(groups: list[FakeNCCL]) -> None:
    there, here = torch.ones(2, device="meta"), torch.ones(2)
    with pytest.raises(ConfigError, match=r"allreduce: its tensor is on meta, this group carries tensors on cpu only"):
        groups[0].allreduce([there])
    with pytest.raises(ConfigError, match=r"allgather: its tensors are on cpu and meta"):
        groups[0].allgather([[here, there]], [here])
    assert groups[0].communicators[0].behaviour.calls.count("launch") == 0
    assert groups[0].errored() is None
    elsewhere = FakeOfOne(TIMEOUT, device="meta")
    elsewhere.configure("", "r", 0, 1)
    with pytest.raises(ConfigError, match="CPU memory need ProcessGroupGloo"):
        elsewhere.allreduce([here])
    elsewhere.shutdown()


def test_ranks_with_different_libraries_are_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [FakeNCCL(TIMEOUT) for _ in range(2)]
    new = FakeNCCL._new_communicator

    def other(group: FakeNCCL) -> Any:
        communicator = new(group)
        communicator.kind = f"fake NCCL {made.index(group)}"
        return communicator

    monkeypatch.setattr(FakeNCCL, "_new_communicator", other)
    with pytest.raises(ConfigError, match="all replicas need the same library"):
        configure_all(made, store.fresh())
    for group in made:
        group.shutdown()


# ------------------------------------------------------------------------------------------- what the fake may do


def test_a_wait_does_not_say_how_a_collective_ended(groups: list[FakeNCCL]) -> None:
    """Garbage that nobody reports is not seen here: the commit's numbers do."""
    groups[1].behaviour.garbage = True
    tensors = [torch.ones(2) for _ in range(2)]
    in_threads(2, lambda rank: groups[rank].allreduce([tensors[rank]]).wait())
    assert tensors[0].tolist() == [2.0, 2.0]
    assert tensors[1].tolist() == [GARBAGE] * 2
    assert groups[1].errored() is None


def test_what_takes_its_time_is_not_done_until_then(groups: list[FakeNCCL]) -> None:
    groups[0].behaviour.delay_s = 0.05
    begin = time.monotonic()
    works = [launch(group) for group in groups]
    assert works[1].is_completed()
    assert not works[0].is_completed() or time.monotonic() - begin > 0.05
    assert works[0].wait()
    assert time.monotonic() - begin >= 0.05
    assert works[0].is_success()


def test_what_an_abort_cuts_short_ends_with_garbage_and_the_error_was_there_before(groups: list[FakeNCCL]) -> None:
    tensor = torch.ones(2)
    work = groups[0].allreduce([tensor])
    assert not work.is_completed()
    seen: list[Exception | None] = []
    finish = groups[0].communicators[0].launched[0].finish

    def finish_later(*, good: bool) -> None:
        seen.append(groups[0]._incarnation.error if groups[0]._incarnation is not None else None)
        finish(good=good)

    groups[0].communicators[0].launched[0].finish = finish_later  # type: ignore[method-assign]
    groups[0].abort()
    assert wait_until(work.is_completed)
    assert isinstance(seen[0], CollectiveError)
    assert tensor.tolist() == [GARBAGE] * 2
    assert not work.is_success()
    with pytest.raises(CollectiveError, match=r"abort\(\) was called"):
        work.wait()
    with pytest.raises(CollectiveError):
        work.get_future().wait()


def test_a_work_that_ended_well_stays_good_after_an_abort(groups: list[FakeNCCL]) -> None:
    works = [launch(group) for group in groups]
    assert wait_until(works[0].is_completed)
    groups[0].abort()
    assert works[0].wait()
    assert works[0].is_success()
    assert works[0].exception() is None


def test_an_error_that_the_library_finds_ends_the_group(groups: list[FakeNCCL]) -> None:
    """Nobody waits, nobody asks: the watch sees it."""
    launch(groups[0])
    groups[0].behaviour.async_error = "the network has gone"
    assert wait_until(lambda: "/abort" in groups[0].behaviour.calls)
    assert "the network has gone" in str(groups[0].errored())


def test_a_launch_that_fails_ends_the_group_and_a_mistake_does_not(groups: list[FakeNCCL]) -> None:
    groups[0].behaviour.launch_error = ValueError("no such dtype")
    with pytest.raises(ValueError, match="no such dtype"):
        launch(groups[0])
    assert groups[0].errored() is None
    groups[0].behaviour.launch_error = RuntimeError("NCCL error")
    with pytest.raises(CollectiveError, match=r"allreduce on the NCCL group .* failed: NCCL error"):
        launch(groups[0])
    assert wait_until(lambda: "/abort" in groups[0].behaviour.calls)
    assert groups[0].behaviour.calls[-4:] == ["launch", "/launch", "abort", "/abort"]


def test_an_init_that_fails_says_so_and_the_next_one_may_succeed(store: Store) -> None:
    group = FakeOfOne(TIMEOUT, behaviour=Behaviour(init_error=RuntimeError("no route")))
    with pytest.raises(CollectiveError, match="did not form: no route"):
        group.configure("", "r", 0, 1)
    assert isinstance(group.errored(), CollectiveError)
    group.behaviour.init_error = None
    group.configure("", "r", 0, 1)
    assert launch(group).wait()
    group.shutdown()
    assert nothing_is_left()
    assert group.behaviour.calls.count("/abort") == 2  # also what never stood is released by its abort


def test_an_init_that_hangs_is_left_behind_and_aborted_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock stands until it is inside: a thread that begins late, as on a loaded machine, never goes there."""
    release = threading.Event()
    group = FakeOfOne(timedelta(milliseconds=50), behaviour=Behaviour(hang_init=release))
    start, now, before = ProcessHost.start, ProcessHost.now, time.monotonic()
    inside_at: list[float] = []

    def start_and_go_inside(host: ProcessHost, name: str, do: Callable[[], None]) -> None:
        start(host, name, do)
        if name == "ft-device-form":
            assert wait_until(lambda: group.behaviour.calls == ["init"])
            inside_at.append(time.monotonic())

    monkeypatch.setattr(ProcessHost, "start", start_and_go_inside)
    monkeypatch.setattr(ProcessHost, "now", lambda host: now(host) if inside_at else before)
    with pytest.raises(CollectiveError, match=r"did not form within 0\.1 s"):
        group.configure("", "r", 0, 1)
    assert time.monotonic() - inside_at[0] < AT_ONCE_S
    hung = group._incarnation
    assert hung is not None
    assert hung.phase is Phase.ABORTING
    assert group.behaviour.calls == ["init"]  # nobody aborts what is inside its init
    release.set()
    assert wait_until(lambda: hung.phase is Phase.ABORTED)
    assert group.behaviour.calls == ["init", "/init", "abort", "/abort"]
    group.shutdown()
    assert nothing_is_left()


def test_an_abort_returns_at_once_and_waits_for_the_launch_inside(groups: list[FakeNCCL]) -> None:
    release = threading.Event()
    groups[0].behaviour.hang_launch = release
    works: list[Any] = []
    thread = threading.Thread(target=lambda: works.append(launch(groups[0])))
    thread.start()
    assert wait_until(lambda: groups[0].behaviour.calls[-1] == "launch")
    begin = time.monotonic()
    groups[0].abort()
    assert time.monotonic() - begin < AT_ONCE_S
    assert isinstance(groups[0].errored(), CollectiveError)
    assert groups[0].behaviour.calls[-1] == "launch"
    release.set()
    thread.join(5)
    assert wait_until(lambda: groups[0].behaviour.calls[-1] == "/abort")
    assert groups[0].behaviour.calls[-4:] == ["launch", "/launch", "abort", "/abort"]
    with pytest.raises(CollectiveError):
        works[0].wait()


def test_the_next_group_waits_for_the_abort_of_the_one_before(groups: list[FakeNCCL], store: Store) -> None:
    release = threading.Event()
    groups[0].behaviour.hang_abort = release
    groups[0].abort()
    thread = threading.Thread(target=configure_all, args=(groups, store.fresh()))
    thread.start()
    assert wait_until(lambda: all("forming" in repr(group) for group in groups))
    assert groups[0].behaviour.calls[-1] == "abort"
    release.set()
    thread.join(10)
    assert not thread.is_alive()
    assert groups[0].behaviour.calls[-4:] == ["abort", "/abort", "init", "/init"]
    in_threads(2, lambda rank: launch(groups[rank]).wait())


def test_the_next_but_one_waits_for_it_too(store: Store) -> None:
    """What is given up while it waits hands its waiting on."""
    release = threading.Event()
    group = FakeOfOne(TIMEOUT, behaviour=Behaviour(hang_abort=release))
    group.configure("", "r", 0, 1)
    fabric = group.communicators[0].fabric
    assert fabric is not None
    fabric.hold()
    launch(group)
    errors: list[Exception] = []

    def configure() -> None:
        try:
            group.configure("", "r", 0, 1)
        except CollectiveError as error:
            errors.append(error)

    threads = [threading.Thread(target=configure) for _ in range(2)]
    threads[0].start()
    assert wait_until(lambda: "forming" in repr(group))
    threads[1].start()
    threads[0].join(5)
    assert len(errors) == 1  # the second call wins
    assert group.behaviour.calls.count("init") == 1
    release.set()
    threads[1].join(5)
    assert launch(group).wait()
    group.shutdown()
    assert nothing_is_left()


def test_the_abort_of_one_that_was_given_up_in_its_init_is_waited_for_once_it_has_begun(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group after it cannot wait for that: its init may never return. The next one finds the abort under way."""
    looks = note_waits(monkeypatch)
    release, free = threading.Event(), threading.Event()
    groups = [FakeNCCL(TIMEOUT) for _ in range(2)]
    stuck = groups[0].behaviour = Behaviour(hang_init=release, hang_freeing=free)
    first = threading.Thread(target=in_vain, args=(configure_all, groups, store.fresh()))
    first.start()
    assert wait_until(lambda: stuck.calls == ["init"])
    given_up = groups[0]._incarnation
    groups[0].behaviour = Behaviour()
    configure_all(groups, store.fresh())  # it does not wait for what is stuck
    first.join(10)
    release.set()
    assert wait_until(lambda: stuck.calls == ["init", "/init", "abort"])
    last = threading.Thread(target=configure_all, args=(groups, store.fresh()))
    last.start()
    assert wait_until(lambda: (given_up, False) in looks)
    free.set()
    last.join(10)
    assert stuck.calls == ["init", "/init", "abort", "/abort"]
    in_threads(2, lambda rank: launch(groups[rank]).wait())
    for group in groups:
        group.shutdown()
    assert nothing_is_left()


def test_of_two_configures_at_once_the_second_ends_what_the_first_was_about_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first has taken its place, and not come to end it, when the second begins: what runs there is waited for."""
    group = FakeOfOne(TIMEOUT)
    group.configure("", "r", 0, 1)
    fabric, running = group.communicators[0].fabric, group._incarnation
    assert fabric is not None
    fabric.hold()
    launch(group)
    end, come, go_on = group._end, threading.Event(), threading.Event()

    def late(incarnation: Any, why: str) -> None:
        if incarnation is running:
            come.set()
            go_on.wait(10)
        end(incarnation, why)

    monkeypatch.setattr(group, "_end", late)
    first = threading.Thread(target=in_vain, args=(group.configure, "", "r", 0, 1))
    first.start()
    assert come.wait(10)
    group.configure("", "r", 0, 1)
    calls = group.behaviour.calls
    assert calls == ["init", "/init", "launch", "/launch", "abort", "/abort", "init", "/init"]
    go_on.set()
    first.join(10)
    assert launch(group).wait()
    group.shutdown()
    assert nothing_is_left()


def test_too_many_that_form_are_refused_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnations, "_forming", threading.BoundedSemaphore(1))
    assert incarnations._forming.acquire()
    group = FakeNCCL(TIMEOUT)
    with pytest.raises(CollectiveError, match="not starting another"):
        group.configure("", "r", 0, 1)
    incarnations._forming.release()
    group.configure("", "r", 0, 1)
    assert launch(group).wait()
    group.shutdown()
    assert nothing_is_left()


def test_a_barrier_blocks_the_host_until_all_are_there_or_the_group_fails(groups: list[FakeNCCL]) -> None:
    work = groups[0].barrier()
    assert not work.is_completed()
    groups[1].barrier().wait()
    assert work.wait()
    alone = groups[0].barrier()
    threading.Timer(0.05, groups[0].abort).start()
    with pytest.raises(CollectiveError):
        alone.wait()


def test_more_in_flight_than_there_is_room_for_is_refused(
    groups: list[FakeNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incarnations, "MAX_IN_FLIGHT", 2)
    for _ in range(2):
        launch(groups[0])
    with pytest.raises(CollectiveError, match=r"2 collectives .* have not ended"):
        launch(groups[0])


def test_the_collective_runs_on_with_the_tensors_alone(groups: list[FakeNCCL]) -> None:
    """`dist.all_reduce(async_op=False)` passes options and throws the work away."""
    tensors = [torch.ones(2) for _ in range(2)]
    for rank in range(2):
        groups[rank].allreduce([tensors[rank]], AllreduceOptions())
    assert wait_until(lambda: tensors[0].tolist() == [2.0, 2.0])


def test_nothing_of_a_group_stays_in_the_store(store: Store) -> None:
    before = store.server.num_keys()
    made = [FakeNCCL(TIMEOUT) for _ in range(3)]
    configure_all(made, store.fresh())
    assert store.server.num_keys() == before
    for group in made:
        group.shutdown()
