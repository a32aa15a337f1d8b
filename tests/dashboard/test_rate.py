"""Steps per second out of looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.dashboard.rate import LOOKS_MAX, WINDOW_S, Rate


def looked(*looks: tuple[float, int]) -> Rate:
    rate = Rate()
    for now, step in looks:
        rate.look(now, step)
    return rate


@pytest.mark.parametrize("every_s", [0.01, 0.25, 1.0, 30.0, 600.0])
def test_a_steady_rate_is_known_whatever_it_is(every_s: float) -> None:
    """Looked at twice a second, as the dashboard does."""
    looks = [look / 2 for look in range(int(max(every_s * 4, 20) * 2))]
    rate = looked(*((now, int(now / every_s)) for now in looks))
    assert rate.per_s(looks[-1]) == pytest.approx(1 / every_s, rel=0.25)


def test_nothing_is_known_before_two_steps() -> None:
    assert looked().per_s(5) == 0
    assert looked((1, 7), (2, 7), (3, 7)).per_s(3) == 0


def test_a_job_that_stands_slows_down_to_nothing() -> None:
    rate = looked(*((t, t * 10) for t in range(10)))
    assert rate.per_s(9) == rate.per_s(10) == 10, "the next step is not overdue yet"
    assert rate.per_s(14) < 6
    assert rate.per_s(1000) < 0.1


def test_a_step_that_goes_back_begins_anew() -> None:
    rate = looked((0, 0), (1, 100), (2, 5))
    assert rate.per_s(2) == 0
    rate.look(3, 7)
    assert rate.per_s(3) == 2


def test_it_follows_a_change_within_the_window() -> None:
    slow = [(float(t), t) for t in range(20)]
    fast = [(20 + t / 2, 20 + t * 50) for t in range(int(WINDOW_S * 2) + 4)]
    assert looked(*slow, *fast).per_s(fast[-1][0]) == pytest.approx(100)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(-3, 1000)), max_size=200))
def test_it_is_bounded_and_never_negative(moves: list[tuple[float, int]]) -> None:
    rate, now, step = Rate(), 0.0, 0
    for passes, more in moves:
        now, step = now + passes, max(0, step + more)
        rate.look(now, step)
        assert rate.per_s(now) >= 0
        assert len(rate._looks) <= LOOKS_MAX
