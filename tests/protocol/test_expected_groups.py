"""How long a room waits for groups that are not there: given up ones not at all, others only while they may matter."""

from __future__ import annotations

import pytest

from ft_core.protocol.lighthouse.events import GivenUp, Hello, Left
from ft_core.protocol.lighthouse.expected_groups import MAX_GIVEN_UP, ExpectedGroups
from ft_core.protocol.types import VOID, Version
from tests.protocol.test_room import JOIN, ORPHAN, Script

GAVE_UP = "replica-1 is not started again, reports its supervisor: died 3 times in a row before its first commit"
WORD = GivenUp("replica-1", "died 3 times in a row before its first commit")


def test_at_a_cold_start_a_missing_group_is_waited_for_no_longer_than_join_s() -> None:
    """Nobody has trained, so there is nothing that the missing one could hold."""
    script = Script(boot_window_s=0.5)
    for number in range(7):
        script.hello(f"g{number}", expected=8)
    out = [script.ask(f"g{number}", min_replicas=2) for number in range(7)][-1]
    assert out == []
    assert "7 of 8 groups are here" in script.later(1.0)[-1]
    assert script.later(JOIN)[0].startswith("quorum g0, g1, g2, g3, g4, g5, g6 -> ")


@pytest.mark.parametrize(
    "shown",
    [{"version": Version(5, 3)}, {"stable": Version(4, 3)}, {"highest_id": 9 << 32}],
    ids=lambda s: next(iter(s)),
)
def test_where_somebody_has_shown_trained_state_the_untrained_wait_for_all(shown: dict[str, object]) -> None:
    script = Script(boot_window_s=0.5)
    script.hello("trained", expected=3, **shown)
    script.do(Left("trained", 1, "drained", False, VOID, agreed=True))
    for name in ("a", "b"):
        script.hello(name, expected=3)
        script.ask(name)
    assert "the others may hold trained state, as one has shown" in script.later(JOIN + 1)[-1]
    assert script.later(ORPHAN)[0] == "quorum a, b -> a#1, b#1"


def test_a_group_that_its_supervisor_gave_up_is_not_waited_for() -> None:
    script = Script(boot_window_s=0.5)
    script.hello("replica-0:1", expected=2)
    script.later(1.0)
    assert script.ask("replica-0:1") == [
        "tell replica-0:1: 1 of 2 groups are here (replica-0:1); waiting for the others"
    ]
    assert script.do(WORD) == [
        f"# {GAVE_UP}",
        "quorum replica-0:1 -> replica-0:1#1",
        "# quorum of 1 at step 0: replica-0:1",
    ]
    assert script.do(WORD) == [], "it is repeated to a lighthouse that may have forgotten"


def test_the_given_up_group_of_a_trained_job_is_not_waited_for() -> None:
    """R9: its processes have ended, so it holds nothing."""
    script = Script(boot_window_s=0.5)
    script.hello("trained", expected=2, version=Version(5, 3))
    script.do(Left("trained", 1, "drained", False, VOID, agreed=True))
    script.hello("replica-0:1", expected=2)
    script.ask("replica-0:1")
    assert "the others may hold trained state" in script.later(JOIN + 1)[-1]
    assert script.do(WORD)[1] == "quorum replica-0:1 -> replica-0:1#1"


def test_a_given_up_member_of_a_quorum_that_a_restarted_lighthouse_adopted_is_gone() -> None:
    script = Script(boot_window_s=0.5)
    running = {"quorum_id": 77 << 32, "members": ("replica-0:1", "replica-1:1"), "version": Version(5, 77 << 32)}
    script.hello("replica-0:1", **running)
    assert "replica-1:1 may still reconnect" in script.ask("replica-0:1", version=Version(5, 77 << 32))[0]
    assert "quorum replica-0:1 -> replica-0:1#1" in script.do(WORD)


def test_a_group_that_comes_all_the_same_is_waited_for_again() -> None:
    script = Script()
    script.do(WORD)
    script.hello("replica-0:1", expected=2)
    script.hello("replica-1:9", expected=2)
    assert "1 of 2 groups are here (replica-0:1)" in script.ask("replica-0:1")[0]
    assert script.ask("replica-1:9")[0] == "quorum replica-0:1, replica-1:9 -> replica-0:1#1, replica-1:9#1"


def test_names_that_were_given_up_are_bounded() -> None:
    groups = ExpectedGroups()
    assert all(groups.give_up(f"g{number}", "why") for number in range(MAX_GIVEN_UP + 9))
    assert len(groups.given_up) == MAX_GIVEN_UP
    assert groups.number([Hello("a:1", "a", 1, 1, expected=3)]) == 0
    assert repr(ExpectedGroups()) == "ExpectedGroups(trained=False, given up: none)"
