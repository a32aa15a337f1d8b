"""R21: a job that has committed does not begin again at step 0 unasked; and never is one that holds a step refused."""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.protocol.lighthouse.events import Ended, Left
from ft_core.protocol.lighthouse.lost_state import OTHERS_S
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.types import VOID, Version
from tests.protocol.test_room import JOIN, ORPHAN, Script


def lost(*, rule: bool = True, commits: int = 3, **hello: Any) -> Script:
    """Two groups have committed, and are both dead, as their supervisor has seen."""
    script = Script(rules=Rules(r21_not_again=rule), **hello)
    script.train("a:1", "b:1")
    if commits:
        script.progress("a:1", commits)
    for name in "a", "b":
        script.ends(f"{name}:1")
        script.do(Ended(f"{name}:1"))
    for name in "a", "b":
        script.hello(f"{name}:2", incarnation=2)
    return script


def test_who_comes_back_without_anything_is_told_that_all_is_lost() -> None:
    script = lost(expected=2)
    assert "those who are here hold none of the 3 steps that this job has committed" in script.ask("a:2")[-1]
    told = script.ask("b:2")
    assert [text.partition(":2 (lost): ")[0] for text in told] == ["refuse a", "refuse b"]
    assert "this job has committed 3 steps, and everybody who held them is gone" in told[0]
    assert "--from-scratch (ftrun), FT_FROM_SCRATCH=1" in told[0]


def test_without_the_rule_it_begins_again() -> None:
    script = lost(rule=False, expected=2)
    script.ask("a:2")
    script.ask("b:2")
    script.later(0.2)
    assert script.room.last_quorum is not None
    assert {m.version for m in script.room.last_quorum.members} == {Version(0, 0)}
    assert "a:2" in script.room.last_quorum.ids


def test_a_single_commit_counts_and_none_does_not() -> None:
    for commits in (0, 1):
        script = lost(commits=commits, expected=2)
        told = [*script.ask("a:2"), *script.ask("b:2")]
        assert any("(lost): this job has committed 1 step," in text for text in told) == bool(commits)
        assert any(text.startswith("quorum a:2") for text in told) == (not commits)


@pytest.mark.parametrize("may", [False, True])
def test_who_holds_half_of_a_state_does_not_wait_for_ever(may: bool) -> None:
    """The last holder was killed while others were receiving its state."""
    script = lost(expected=2)
    script.ask("a:2", version=VOID)
    told = script.ask("b:2", version=VOID, from_scratch=may)
    assert len(told) == 2
    for text, name in zip(told, "ab", strict=True):
        if may:
            assert text.startswith(f"refuse {name}:2: no group holds a usable state: a:2, b:2 were interrupted"), text
            assert text.endswith("only a new start of this replica can begin again")
        else:
            assert text.startswith(f"refuse {name}:2 (lost): this job has committed 3 steps"), text


def test_half_of_a_state_waits_for_its_holder() -> None:
    script = Script(expected=2)
    script.train("a:1", "b:1")
    script.progress("a:1", 3)
    script.ends("a:1")
    script.later(JOIN)
    script.do(Ended("b:1"))
    script.hello("b:2", incarnation=2)
    assert "refuse" not in str(script.ask("b:2", version=VOID))
    assert "refuse" not in str(script.later(OTHERS_S))


@pytest.mark.parametrize("how", ["flag", "checkpoint"])
def test_one_that_may_begin_is_enough(how: str) -> None:
    script = lost(expected=2)
    more: dict[str, Any] = {"from_scratch": True} if how == "flag" else {"version": Version(2, 0)}
    script.ask("a:2")
    assert script.ask("b:2", **more)[0].startswith("quorum a:2, b:2")


def test_after_that_the_new_beginning_counts() -> None:
    """It is killed before it has committed anything: nothing more is lost."""
    script = lost(expected=2)
    script.ask("a:2", from_scratch=True)
    script.ask("b:2", from_scratch=True)
    for name in "a", "b":
        script.ends(f"{name}:2")
        script.do(Ended(f"{name}:2"))
        script.hello(f"{name}:3", incarnation=3)
    assert script.ask("a:3")[0].startswith("quorum a:3")


def test_groups_that_may_have_a_checkpoint_are_waited_for() -> None:
    script = lost(expected=2)
    script.ask("a:2")
    assert not script.later(OTHERS_S - 1)
    assert "quorum a:2, b:2" in script.ask("b:2", version=Version(2, 0))[0]
    alone = lost()
    alone.ask("a:2")
    assert "(lost)" in alone.later(OTHERS_S + JOIN)[-1]


def test_a_member_that_may_live_is_waited_for() -> None:
    """It went silent: it may still hold the one step that was committed, of which nobody else knows."""
    script = Script(expected=2)
    script.train("a:1", "b:1")
    script.progress("a:1", 1)
    script.ends("a:1", silence_s=10.0)
    script.ends("b:1")
    script.do(Ended("b:1"))
    script.hello("b:2", incarnation=2)
    assert "a:1 holds step 1, newer than the step 0 of those who ask" in script.ask("b:2")[-1]
    assert not script.later(ORPHAN - 2)
    assert "(lost)" in script.later(4.0)[-1]


@pytest.mark.parametrize("over", [False, True])
def test_a_script_that_ended_by_itself_leaves_its_lighthouse_to_the_next(over: bool) -> None:
    """A drained one, or one that ends with an error, does not."""
    script = Script(expected=2)
    script.train("a:1", "b:1")
    script.progress("a:1", 5)
    for name in "a:1", "b:1":
        script.do(Left(name, 1, "shut down", finished=False, version=Version(5, 1), agreed=True, over=over))
    for name in "a:2", "b:2":
        script.hello(name, incarnation=2)
    told = [*script.ask("a:2"), *script.ask("b:2")]
    assert any("(lost)" in text for text in told) != over
