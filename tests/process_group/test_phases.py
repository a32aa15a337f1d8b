"""The life cycle of a communicator: which call is allowed when, and what an abort leads to. No thread, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.process_group.device.phases import (
    NOTHING,
    TRANSITIONS,
    Action,
    CallAbort,
    EndProcess,
    Lifecycle,
    Phase,
    WatchDeadline,
)

ABORT_S = 10.0
REASON = RuntimeError("why")


def ready() -> Lifecycle:
    life = Lifecycle(ABORT_S)
    assert life.formed(0.0) == NOTHING
    return life


def test_repr_tells_the_state() -> None:
    life = Lifecycle(ABORT_S)
    assert repr(life) == "Lifecycle(forming, something inside, error=None)"
    life.formed(0.0)
    assert repr(life) == "Lifecycle(ready, error=None)"


def test_one_launch_at_a_time_and_none_before_it_has_formed() -> None:
    life = Lifecycle(ABORT_S)
    assert not life.enter()
    life.formed(0.0)
    assert life.enter()
    assert not life.enter()
    life.leave(0.0)
    assert life.enter()


def test_an_abort_of_an_idle_one_is_called_at_once_and_once() -> None:
    life = ready()
    assert life.abort(REASON, 5.0) == (WatchDeadline(15.0), CallAbort())
    assert life.error is REASON
    assert life.abort(RuntimeError("again"), 6.0) == NOTHING
    assert life.error is REASON
    assert not life.enter()
    assert life.abort_ended(None, runs=False) == NOTHING
    assert life.phase is Phase.ABORTED
    assert life.tick(99.0) == NOTHING


def test_an_abort_waits_for_the_launch_inside_and_its_time_runs_meanwhile() -> None:
    life = ready()
    life.enter()
    assert life.abort(REASON, 5.0) == (WatchDeadline(15.0),)
    assert life.error is REASON  # known before anything ends
    assert life.leave(8.0) == (CallAbort(),)


def test_what_is_given_up_while_it_forms_is_aborted_when_its_init_has_returned() -> None:
    life = Lifecycle(ABORT_S)
    assert life.abort(REASON, 5.0) == NOTHING
    assert life.tick(1000.0) == NOTHING
    assert life.formed(50.0) == (WatchDeadline(60.0), CallAbort())
    assert life.phase is Phase.ABORTING


def test_the_next_group_has_something_to_wait_for_from_the_abort_on_also_while_a_launch_is_inside() -> None:
    life = ready()
    assert not life.ending
    life.enter()
    life.abort(REASON, 5.0)
    assert life.ending
    life.leave(8.0)
    assert life.ending
    life.abort_ended(None, runs=False)
    assert not life.ending
    given_up = Lifecycle(ABORT_S)
    given_up.abort(REASON, 5.0)
    assert not given_up.ending  # its init may never return
    given_up.formed(50.0)
    assert given_up.ending


def test_an_init_that_failed_is_aborted_all_the_same() -> None:
    life = Lifecycle(ABORT_S)
    assert life.failed(REASON)
    assert life.leave(1.0) == NOTHING
    assert life.abort(RuntimeError("later"), 2.0) == (WatchDeadline(12.0), CallAbort())
    assert life.error is REASON


def test_a_failure_while_a_launch_is_inside_begins_the_abort_s_time_too() -> None:
    """Found by test_interleavings: what had failed passed for forming, and had no deadline."""
    life = ready()
    life.enter()
    assert life.failed(REASON)
    assert life.abort(REASON, 5.0) == (WatchDeadline(15.0),)


@pytest.mark.parametrize(
    ("inside", "says"), [(False, "its abort has not returned"), (True, "a launch does not return")]
)
def test_an_abort_that_takes_too_long_ends_the_process_once(inside: bool, says: str) -> None:
    life = ready()
    if inside:
        life.enter()
    life.abort(REASON, 5.0)
    assert life.tick(14.9) == NOTHING
    assert life.tick(15.0) == (EndProcess(f"{says} 10.0 s after it was to be aborted"),)
    assert life.phase is Phase.STUCK
    assert life.tick(16.0) == NOTHING
    assert life.abort_ended(None, runs=False) == NOTHING


@pytest.mark.parametrize("runs", [False, True])
def test_an_abort_that_fails_ends_the_process_only_if_something_runs(runs: bool) -> None:
    life = ready()
    life.abort(REASON, 5.0)
    actions = life.abort_ended(RuntimeError("no abort"), runs=runs)
    assert actions == ((EndProcess("its abort failed (no abort) while a collective ran"),) if runs else NOTHING)
    assert life.phase is (Phase.STUCK if runs else Phase.ABORTED)


def test_every_phase_says_what_follows() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert TRANSITIONS[Phase.ABORTED] == TRANSITIONS[Phase.STUCK] == frozenset()


@given(
    st.lists(st.sampled_from(["formed", "enter", "leave", "failed", "abort", "ended", "broken", "tick"]), max_size=30)
)
def test_whatever_happens_in_whatever_order_the_invariants_hold(events: list[str]) -> None:
    life, now, called, ended = Lifecycle(ABORT_S), 0.0, 0, 0
    for event in events:
        now += 3.0
        before = life.error
        actions: tuple[Action, ...] = NOTHING
        if event == "formed" and life.phase in (Phase.FORMING, Phase.ABORTING) and life.inside:
            actions = life.formed(now)
        elif event == "enter":
            entered = life.enter()
            assert not entered or life.phase is Phase.READY
        elif event == "leave" and life.inside:
            actions = life.leave(now) if life.phase is not Phase.FORMING else NOTHING
        elif event == "failed":
            life.failed(RuntimeError("failed"))
        elif event == "abort":
            actions = life.abort(REASON, now)
        elif event in ("ended", "broken") and life.abort_called:
            actions = life.abort_ended(None if event == "ended" else REASON, runs=True)
        elif event == "tick":
            actions = life.tick(now)
        life.validate()
        assert before is None or life.error is before  # latched
        for action in actions:
            assert life.error is not None
            assert not (isinstance(action, CallAbort) and life.inside)
        called += sum(isinstance(action, CallAbort) for action in actions)
        ended += sum(isinstance(action, EndProcess) for action in actions)
        assert called <= 1
        assert ended <= 1
