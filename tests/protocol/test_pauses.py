"""Announced pauses and the waits that they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.protocol.pauses import MAX_PAUSES, PAUSE_SLACK_S, GroupPauses, Pauses, Wait, differs


def waits_until(pauses: Pauses, wait: Wait, *events: tuple[float, str, float]) -> float:
    """When a wait is over, if these announcements (at, who, for_s) come."""
    for at, who, for_s in sorted(events):
        while wait.at < at:
            now = wait.at
            if wait.over(now):
                return now
        pauses.announce(who, for_s, at)
    while not wait.over(now := wait.at):
        assert wait.at > now
    return now


def test_without_a_pause_a_wait_lasts_its_limit() -> None:
    pauses = Pauses()
    wait = Wait(pauses, 5.0, 100.0)
    assert not wait.over(104.9)
    assert wait.over(105.0)
    assert waits_until(Pauses(), Wait(Pauses(), 5.0, 100.0)) == 105.0


@pytest.mark.parametrize(
    ("events", "over"),
    [
        ([(101.0, "a", 60.0)], 166.0),  # it never comes back: the limit counts from the announced end
        ([(101.0, "a", 60.0), (113.0, "a", 0.0)], 118.0),  # it is back early: from then
        ([(101.0, "a", 60.0), (102.0, "b", 5.0), (113.0, "a", 0.0)], 118.0),
        ([(101.0, "a", 2.0), (102.5, "a", 60.0), (110.0, "a", 0.0)], 115.0),  # a longer one within
        ([(101.0, "a", 60.0), (103.0, "a", 1.0)], 109.0),  # corrected
        ([(90.0, "a", 60.0), (113.0, "a", 0.0)], 118.0),  # open before the wait began
        ([(90.0, "a", 5.0)], 105.0),  # over before the wait began
        ([(104.0, "a", 0.0)], 105.0),  # of somebody who was not known to be paused
    ],
)
def test_a_limit_counts_from_the_end_of_the_last_pause(events: list[tuple[float, str, float]], over: float) -> None:
    pauses = Pauses()
    for at, who, for_s in events:
        if at < 100.0:
            pauses.announce(who, for_s, at)
    wait = Wait(pauses, 5.0, 100.0)
    assert waits_until(pauses, wait, *(event for event in events if event[0] >= 100.0)) == pytest.approx(over)


@given(st.lists(st.tuples(st.floats(0, 50), st.sampled_from("ab"), st.floats(0, 30)), max_size=8), st.floats(0.1, 10.0))
def test_a_wait_ends_and_never_during_a_pause(events: list[tuple[float, str, float]], limit_s: float) -> None:
    pauses = Pauses()
    over = waits_until(pauses, Wait(pauses, limit_s, 0.0), *events)
    assert over >= limit_s - 1e-9
    ends: dict[str, float] = {}
    for at, who, for_s in sorted(events):
        if at <= over:
            ends[who] = at + for_s if for_s else 0.0
    assert over <= max([50.0, *ends.values()]) + 2 * limit_s + 1e-6
    assert all(end <= over + 1e-6 for end in ends.values())


def test_a_new_quorum_forgets_and_the_map_is_bounded() -> None:
    pauses = Pauses()
    for number in range(2 * MAX_PAUSES):
        pauses.announce(str(number), 10.0 + number, 0.0)
    assert len(pauses.open(0.0)) == MAX_PAUSES
    assert str(2 * MAX_PAUSES - 1) in pauses.open(0.0), "the longest are kept"
    pauses.forget()
    assert pauses.open(0.0) == {}
    assert repr(pauses) == "Pauses(none)"


def test_what_is_news() -> None:
    assert differs(10.0, 0.0)
    assert differs(0.0, 10.0)
    assert not differs(10.0, 10.0 + PAUSE_SLACK_S)
    assert differs(10.0, 10.1 + PAUSE_SLACK_S)
    assert not differs(0.0, 0.0)


def test_a_group_is_paused_while_one_of_its_ranks_is() -> None:
    group = GroupPauses(3)
    assert group.news(100.0) is None
    assert group.set(2, 130.0)
    assert not group.set(2, 130.2)
    assert group.news(100.0) == pytest.approx(30.2)
    assert group.news(101.0) is None, "told once"
    group.set(1, 110.0)
    assert group.news(101.0) is None, "the group is paused for longer anyway"
    assert group.left_s([0, 1], 101.0) == 9.0
    group.set(2, 0.0)
    assert group.news(102.0) == 8.0
    group.new_quorum()
    assert group.news(103.0) == 7.0
    assert group.news(111.0) == 0.0, "it ran out"
    assert repr(group) == "GroupPauses([1])"
