"""What happens at once on one device group, in any order: launches, aborts, failures, ends of kernels, a commit.

How it works. The real `Incarnation` runs over a fake communicator and a fake host, all on this thread. Where the real
ones take time, others come between: inside a launch, inside the communicator's abort, between the two looks of a
commit, hypothesis draws what else happens there, and to the threads that were started but have not run. So each case is
one interleaving, the same each time. A commit does what the contract says: it waits for an event behind the last work,
then reads the group's error. What goes wrong inside the communicator is kept and checked outside: raised, it would pass
for a failure of the device.

What must hold in all of them: nothing is launched once an abort was called; no abort is called while a launch is
inside; no commit is made of a collective that was cut short; an abort that takes too long ends the process, at once and
once, and no other does.
"""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_core.errors import CollectiveError
from ft_core.process_group.device import incarnation as incarnations
from ft_core.process_group.device.incarnation import Incarnation
from ft_core.process_group.device.phases import Phase
from ft_core.process_group.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

ABORT_S = 10.0
TIMEOUT_S = 4.0
STEP_S = 4.0
"""What passes at once: three of them are more than an abort may take."""
MAX_DEPTH = 3
"""How deep things may happen inside of others."""
STEPS = ("launch", "fail launch", "kernel", "fail", "abort", "run", "time", "look", "commit", "drop")


class Never(BaseException):
    """Raised out of a call that never returns: its thread is inside for ever."""


class FakeHost:
    """Threads that run when the test says so, and a clock that it sets."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waiting: list[Callable[[], None]] = []
        self.deadlines: dict[int, tuple[float, Callable[[], None]]] = {}
        self.ended: list[float] = []
        self._counter = itertools.count()

    def now(self) -> float:
        return self.time

    def start(self, name: str, do: Callable[[], None]) -> None:
        if name == "ft-device-form":
            do()
        else:
            self.waiting.append(do)

    def after(self, seconds: float, do: Callable[[], None]) -> Callable[[], None]:
        number = next(self._counter)
        self.deadlines[number] = (self.time + seconds, do)
        return lambda: self.deadlines.pop(number, None) and None

    def end_process(self, reason: str) -> None:
        self.ended.append(self.time)

    def pass_time(self, seconds: float) -> None:
        """The time passes; what is due then is due exactly then."""
        end = self.time + seconds
        while due := [(at, number) for number, (at, _) in self.deadlines.items() if at <= end]:
            at, number = min(due)
            self.time = at
            self.deadlines.pop(number)[1]()
        self.time = end


class FakeKernel:
    """A collective on the device."""

    def __init__(self) -> None:
        self.done = False
        self.cut_short = False

    def order(self) -> None: ...

    def is_done(self) -> bool:
        return self.done

    def result(self) -> list[torch.Tensor]:
        return []

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()


class World:
    """One group, and what happens to it; `steps` are taken from the front wherever something can come between."""

    def __init__(self, steps: list[str], hangs: bool) -> None:
        self.kind = "fake"
        self.steps = steps
        self.hangs = hangs
        self.depth = 0
        self.inside = False
        self.abort_called = False
        self.abort_wanted_at: float | None = None
        self.kernels: list[FakeKernel] = []
        self.fails = False
        self.found: str | None = None
        self.commits: list[bool] = []
        self.broken: list[str] = []
        self.error: Exception | None = None
        """The group's, once all steps are made."""
        self.host = FakeHost()
        self.group = Incarnation(
            Spec(
                what="fake",
                store_addr="",
                replica_id="r",
                rank=0,
                world_size=1,
                timeout=timedelta(seconds=TIMEOUT_S),
            ),
            self,
            abort_s=ABORT_S,
            host=self.host,
        )

    # ------------------------------------------------------------------------------------------ the communicator's side

    def init(self, store: Store, rank: int, world_size: int, checkpoint: Callable[[], None]) -> None: ...

    def launch(self, name: str, *arguments: Any) -> FakeKernel:
        self.must(not self.abort_called, "a launch after an abort")
        self.must(not self.inside, "two launches at once")
        self.inside = True
        fails, self.fails = self.fails, False
        try:
            self.between()
        finally:
            self.inside = False
        if fails:
            raise RuntimeError("launch failed")
        self.kernels.append(FakeKernel())
        return self.kernels[-1]

    def query(self) -> str | None:
        return self.found

    def abort(self) -> None:
        self.must(not self.inside, "an abort while a launch is inside")
        self.must(not self.abort_called, "a second abort")
        self.abort_called = True
        self.between()
        for kernel in self.kernels:  # ends them one by one, with garbage and without a word
            if not kernel.done:
                kernel.done = kernel.cut_short = True
                self.between(1)
        if self.hangs:
            raise Never

    # ------------------------------------------------------------------------------------------------ what else happens

    def between(self, at_most: int = 3) -> None:
        """Let others happen here."""
        if self.depth >= MAX_DEPTH:
            return
        self.depth += 1
        for _ in range(at_most):
            if not self.steps or self.steps[0] == "return":
                self.steps[:1] = []
                break
            self.step()
        self.depth -= 1

    def step(self) -> None:
        getattr(self, f"do_{self.steps.pop(0).replace(' ', '_')}")()
        self.check()

    def do_return(self) -> None: ...

    def do_launch(self) -> None:
        if self.inside:
            return  # it would wait for the launch that is inside
        try:
            self.group.launch("allreduce", ())
        except CollectiveError:
            assert self.group.error is not None

    def do_fail_launch(self) -> None:
        self.fails = not self.inside
        self.do_launch()
        self.fails = False

    def do_kernel(self) -> None:
        for kernel in self.kernels:  # in the order of their launch
            if not kernel.done:
                kernel.done = True
                return

    def do_fail(self) -> None:
        self.found = "a peer has gone"

    def do_abort(self) -> None:
        self.group.abort(CollectiveError("abort"))

    def do_drop(self) -> None:
        if self.depth == 0:
            self.group.try_destroy()

    def do_run(self) -> None:
        if self.host.waiting:
            with contextlib.suppress(Never):
                self.host.waiting.pop(0)()

    def do_time(self) -> None:
        self.host.pass_time(STEP_S)

    def do_look(self) -> None:
        self.group.look()

    def do_commit(self) -> None:
        """By the contract: all that was launched has ended, then no error."""
        before = list(self.kernels)
        self.between()
        if not all(kernel.done for kernel in before):
            return  # it would wait
        cut_short = any(kernel.cut_short for kernel in before)
        self.between()
        committed = self.group.first_error() is None
        self.must(not (committed and cut_short), "a commit of what was cut short")
        self.commits.append(committed)

    # -------------------------------------------------------------------------------------------------- what must hold

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)

    def check(self) -> None:
        """Everything that must hold now; what is found inside of a call of the group's is raised outside of it."""
        try:
            self.look_at_all()
        except AssertionError as error:
            self.broken.append(str(error).partition("\n")[0])
        if self.depth == 0:
            assert not self.broken, self.broken

    def look_at_all(self) -> None:
        group, host = self.group, self.host
        group._life.validate()
        if group.is_aborted and self.abort_wanted_at is None:
            self.abort_wanted_at = host.time
        assert len(host.ended) <= 1, "ended twice"
        if group.phase is Phase.STUCK:
            assert host.ended, "stuck, and the process goes on"
        if host.ended:
            assert group.phase is Phase.STUCK, "ended without need"
        if self.abort_wanted_at is not None and group.phase is Phase.ABORTING:
            assert host.time < self.abort_wanted_at + ABORT_S, "the deadline has passed"


def run(steps: list[str], *, hangs: bool) -> World:
    world = World(list(steps), hangs)
    world.group.form()
    assert world.group.phase is Phase.READY
    while world.steps:
        world.step()
    world.error = world.group.error
    # To the end: whatever happened, an abort now leads to a released group or to the end of the process.
    world.do_abort()
    world.check()
    while world.host.waiting:
        world.do_run()
    world.host.pass_time(ABORT_S)
    world.check()
    assert world.group.phase is (Phase.STUCK if world.host.ended else Phase.ABORTED)
    assert world.group.try_destroy() == (not world.host.ended)
    world.group.become_child()  # not kept for the end of this process
    incarnations._live.discard(world.group)
    return world


def interleaving() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from((*STEPS, "return")), max_size=30)


@given(interleaving(), st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_interleaving_breaks_a_rule(steps: list[str], hangs: bool) -> None:
    run(steps, hangs=hangs)


@pytest.mark.long
@pytest.mark.timeout(600)
@given(interleaving(), st.booleans())
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_interleaving_of_10_000_breaks_a_rule(steps: list[str], hangs: bool) -> None:
    run(steps, hangs=hangs)


def test_the_cases_reach_what_they_are_about() -> None:
    """Each rule is tried: an abort inside a launch, a commit between flag and cut, a hang, a good commit."""
    inside = run(["launch", "abort", "run", "return", "kernel", "run"], hangs=False)
    assert inside.abort_called
    assert [kernel.done for kernel in inside.kernels] == [True]
    between = run(["launch", "return", "commit", "abort", "run", "return"], hangs=False)
    assert between.kernels[0].cut_short  # while the commit waits for it
    assert between.commits == [False]
    cut = run(["launch", "return", "abort", "run", "return", "return", "commit", "return", "return"], hangs=False)
    assert cut.commits[:1] == [False]
    good = run(["launch", "return", "kernel", "commit", "return", "return"], hangs=False)
    assert good.commits == [True]
    assert run(["launch", "return", "abort", "run"], hangs=True).host.ended == [ABORT_S]
    late = run(["launch", "return", "time", "time", "look"], hangs=False)
    assert "timed out" in str(late.error)
