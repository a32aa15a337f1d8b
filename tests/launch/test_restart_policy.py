"""Restart policy: the rules one by one, all short histories, and the budget against an obvious oracle."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.errors import ConfigError
from ft_core.launch.restart_policy import Quarantine, Restart, RestartPolicy, RestartSettings

NO_LOOP = 10_000
"""A crash_loop that these tests never reach."""


def after(decision: Restart | Quarantine) -> float:
    assert isinstance(decision, Restart), decision
    return decision.after_s


def reason(decision: Restart | Quarantine) -> str:
    assert isinstance(decision, Quarantine), decision
    return decision.reason


def test_zero_restarts_means_never() -> None:
    for committed, excused in itertools.product([False, True], repeat=2):
        policy = RestartPolicy(RestartSettings(max_restarts=0))
        assert (
            reason(policy.failed(1.0, committed=committed, excused=excused)) == "never restarted: --max-restarts is 0"
        )


def test_a_crash_loop_is_quarantined_with_the_number_of_deaths() -> None:
    policy = RestartPolicy(RestartSettings())
    assert policy.failed(0.0, committed=False) == Restart(
        0.0, "died before its first commit (1 in a row); restart 1 of 10 in 3600 s"
    )
    assert after(policy.failed(5.0, committed=False)) == 1.0
    assert reason(policy.failed(9.0, committed=False)) == "died 3 times in a row before its first commit"


def test_a_crash_loop_of_one_says_once() -> None:
    policy = RestartPolicy(RestartSettings(crash_loop=1))
    assert reason(policy.failed(0.0, committed=False)) == "died once before its first commit"


def test_a_commit_ends_the_row() -> None:
    policy = RestartPolicy(RestartSettings(max_restarts=100))
    for _ in range(10):
        assert after(policy.failed(0.0, committed=False)) == 0.0
        assert after(policy.failed(0.0, committed=False)) == 1.0
        assert after(policy.failed(0.0, committed=True)) == 0.0


def test_backoff_doubles_up_to_its_maximum() -> None:
    policy = RestartPolicy(RestartSettings(max_restarts=2000, crash_loop=NO_LOOP, backoff_s=2.0, backoff_max_s=15.0))
    waits = [after(policy.failed(0.0, committed=False)) for _ in range(1500)]
    assert waits[:7] == [0.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert set(waits[4:]) == {15.0}


def test_the_budget_is_per_window_and_comes_back() -> None:
    settings = RestartSettings(max_restarts=2, window_s=10.0)
    for third, allowed in [(9.9, False), (10.0, True)]:
        policy = RestartPolicy(settings)
        assert after(policy.failed(0.0, committed=True)) == 0.0
        assert policy.failed(1.0, committed=True) == Restart(0.0, "died after a commit; restart 2 of 2 in 10 s")
        assert isinstance(policy.failed(third, committed=True), Restart) is allowed


def test_a_spent_budget_says_so() -> None:
    policy = RestartPolicy(RestartSettings(max_restarts=1, window_s=60.0))
    policy.failed(0.0, committed=True)
    spent = "restarted 1 times in 60 s, as often as --max-restarts allows"
    assert reason(policy.failed(1.0, committed=True)) == spent
    assert repr(policy) == "RestartPolicy(quarantined, 1 of 1 restarts, 0 of 3 deaths in a row)"


def test_a_budget_without_end_of_window() -> None:
    policy = RestartPolicy(RestartSettings(max_restarts=1, window_s=math.inf))
    assert after(policy.failed(0.0, committed=True)) == 0.0
    assert "in all" in reason(policy.failed(1e12, committed=True))


def test_excused_failures_cost_nothing_and_restart_at_once() -> None:
    policy = RestartPolicy(RestartSettings(max_restarts=3, crash_loop=3))
    policy.failed(0.0, committed=False)
    before = repr(policy)
    for _ in range(50):
        assert policy.failed(0.0, committed=False, excused=True) == Restart(0.0, "ended on purpose")
    assert repr(policy) == before == "RestartPolicy(may restart, 1 of 3 restarts, 1 of 3 deaths in a row)"
    assert after(policy.failed(0.0, committed=False)) == 1.0


def test_quarantine_is_final() -> None:
    policy = RestartPolicy(RestartSettings(crash_loop=1, window_s=1.0))
    first = policy.failed(0.0, committed=False)
    assert isinstance(first, Quarantine)
    for committed, excused in itertools.product([False, True], repeat=2):
        assert policy.failed(1e9, committed=committed, excused=excused) is first


def test_a_clock_that_goes_back_does_not_give_budget_back() -> None:
    policy = RestartPolicy(RestartSettings(max_restarts=2, window_s=10.0))
    policy.failed(100.0, committed=True)
    policy.failed(0.0, committed=True)
    assert isinstance(policy.failed(109.0, committed=True), Quarantine)


def test_every_short_history_quarantines_exactly_after_the_rule() -> None:
    """All 4^6 histories of (committed, excused) at one instant, against the rules written down plainly."""
    settings = RestartSettings(max_restarts=4, crash_loop=3)
    for history in itertools.product(itertools.product([False, True], repeat=2), repeat=6):
        policy, row, used, down = RestartPolicy(settings), 0, 0, False
        for committed, excused in history:
            decision = policy.failed(0.0, committed=committed, excused=excused)
            if not down:
                row = 0 if committed else row + (not excused)
                if not excused:
                    down = (not committed and row >= 3) or used == 4
                    used += not down
            assert isinstance(decision, Quarantine) is down, history


runs = st.lists(st.tuples(st.floats(0, 30), st.booleans(), st.booleans()), max_size=60)


@given(runs=runs, max_restarts=st.integers(1, 6), window_s=st.floats(0.5, 60), crash_loop=st.integers(1, 8))
def test_no_window_ever_holds_more_restarts_than_the_budget(
    runs: list[tuple[float, bool, bool]], max_restarts: int, window_s: float, crash_loop: int
) -> None:
    settings = RestartSettings(max_restarts, window_s, crash_loop, 0.5, 8.0)
    policy, now, restarts, waits = RestartPolicy(settings), 0.0, list[float](), list[float]()
    for lived_s, committed, excused in runs:
        now += lived_s
        decision = policy.failed(now, committed=committed, excused=excused)
        if isinstance(decision, Quarantine):
            break
        assert 0 <= decision.after_s <= settings.backoff_max_s
        waits = [] if committed else waits
        if not excused:
            now += decision.after_s
            restarts.append(now)
            if not committed:
                assert not waits or decision.after_s >= waits[-1], "the wait shrank within a row"
                waits.append(decision.after_s)
                assert len(waits) < crash_loop
        else:
            assert decision.after_s == 0
        in_window = [at for at in restarts if at > now - window_s]
        assert len(in_window) <= max_restarts


@given(runs=runs, max_restarts=st.integers(1, 6), more=st.integers(1, 5))
def test_a_larger_budget_never_gives_up_sooner(
    runs: list[tuple[float, bool, bool]], max_restarts: int, more: int
) -> None:
    def lives(budget: int) -> int:
        policy, now = RestartPolicy(RestartSettings(max_restarts=budget, window_s=40.0)), 0.0
        for index, (lived_s, committed, excused) in enumerate(runs):
            now += lived_s
            if isinstance(policy.failed(now, committed=committed, excused=excused), Quarantine):
                return index
        return len(runs)

    assert lives(max_restarts) <= lives(max_restarts + more)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (RestartSettings(max_restarts=-1), "--max-restarts -1: must be 0"),
        (RestartSettings(window_s=0.0), "--restart-window 0.0: must be a positive"),
        (RestartSettings(window_s=math.nan), "--restart-window nan: must be a positive"),
        (RestartSettings(crash_loop=0), "--crash-loop 0: must be at least 1"),
        (RestartSettings(backoff_s=-1.0), "backoff_s=-1.0 and"),
        (RestartSettings(backoff_s=9.0, backoff_max_s=3.0), "backoff_s=9.0 and backoff_max_s=3.0"),
        (RestartSettings(backoff_max_s=math.inf), "backoff_max_s=inf"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: RestartSettings, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RestartPolicy(settings)
