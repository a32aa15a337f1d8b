"""R17: everybody knows whose share of a committed step is in it; and who cannot be healed costs the others one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ft_core.protocol.group.group import UNEVEN, merge_asks, merge_votes
from ft_core.protocol.rank.phases import MustAsk
from ft_core.protocol.types import Ask, Outcome, Verdict, Version
from tests.protocol.rig import Rig, new_step


def with_a_failed_heal(names: str = "abc", **more: Any) -> Rig:
    """A synchronous quorum at step 1 in which the last member is planned to contribute, and cannot be healed."""
    rig = Rig(names[:-1], **more)
    rig.form()
    rig.attempt()
    for step in rig.steps.values():
        step.break_("test")
    rig.steps[names[-1]] = new_step(names[-1], lineage=99, **more)
    again(rig)
    return rig


def again(rig: Rig) -> None:
    """All ask for the next quorum; the last one's heal fails in it."""
    rig.form(heal=False, heals_before_forward=True)
    last = [*rig.steps.values()][-1]
    assert last.plan is not None
    last.heal_failed(last.plan.quorum_id, "no donor")


def test_zeros_of_a_planned_participant_are_seen_by_all() -> None:
    rig = with_a_failed_heal()
    assert rig["a"].participants == (0, 1, 2)
    verdicts = rig.fence()
    assert {(v.outcome, v.missing, v.contributors, v.weight) for v in verdicts.values()} == {
        (Outcome.COMMIT, (2,), 2, 2)
    }
    rig["c"].settle(verdicts["c"])
    rig["a"].settle(verdicts["a"])
    assert (rig["a"].commit_weight, rig["c"].commit_weight) == (2, 0)


def test_it_is_not_counted_on_again_until_it_is_healed() -> None:
    rig = with_a_failed_heal()
    rig.attempt()
    for _ in range(3):
        again(rig)
        assert rig["a"].participants == (0, 1)
        assert not rig["c"].plan.heals_first  # type: ignore[union-attr]
        assert rig.fence()["a"].missing == ()
        for step in rig.steps.values():
            step.settle(step.verdict)  # type: ignore[arg-type]
    rig.form(heals_before_forward=True)
    assert rig.attempt() == dict.fromkeys("abc", True)
    assert rig["a"].participants == (0, 1, 2)
    assert not rig["c"].heals_late
    for step in rig.steps.values():
        step.break_("test")
    assert rig.form(heals_before_forward=True)["c"].participants == (0, 1, 2)


def test_also_untrained() -> None:
    rig = Rig()
    again(rig)
    rig["b"].healed(rig["b"].plan.quorum_id)  # type: ignore[union-attr]
    rig["b"].heal_applied(None, 0, 0)
    assert rig.fence()["a"].missing == (2,)
    for step in rig.steps.values():
        step.settle(replace(step.verdict, outcome=Outcome.VETO))  # type: ignore[arg-type,type-var]
    rig["a"].break_("test")
    again(rig)
    assert rig["a"].participants == (0, 1)


def test_empty_shares_are_not_missing() -> None:
    """A filler of the elastic loader, and who has run out of data, whether it follows the commits or not."""
    rig = Rig()
    rig.form()
    rig["a"].weight = 0
    rig["b"].data.exhausted = rig["b"].data.trails = True
    for _ in range(2):
        verdict = rig.fence()["c"]
        assert (verdict.outcome, verdict.missing, verdict.contributors) == (Outcome.COMMIT, (), 1)
        for step in rig.steps.values():
            step.settle(step.verdict)  # type: ignore[arg-type]


def test_who_leaves_gives_up_its_share() -> None:
    rig = Rig()
    rig.form()
    rig["b"].departure.leaving = rig["b"].data.exhausted = True  # as Manager.leave does
    assert rig.fence()["a"].missing == (1,)


def test_places_are_those_among_the_participants() -> None:
    rig = with_a_failed_heal("bcd")
    rig.steps["a"] = new_step("a", lineage=98)
    rig["a"].heals_late = True
    for step in rig.steps.values():
        step.break_("test")
    rig.form(heal=False, heals_before_forward=True)
    rig["d"].heal_failed(rig["d"].plan.quorum_id, "no donor")  # type: ignore[union-attr]
    assert rig["b"].participants == (1, 2, 3)
    assert {v.missing for v in rig.fence().values()} == {(2,)}


def test_a_whole_step_is_vetoed_alike_and_the_next_quorum_goes_on() -> None:
    rig = with_a_failed_heal()
    for step in rig.steps.values():
        step.whole_steps = True
    verdicts = rig.fence()
    assert {(v.outcome, v.reason) for v in verdicts.values()} == {
        (Outcome.VETO, "every step has to be whole, and c contributed nothing")
    }
    for name, step in rig.steps.items():
        assert not step.settle(verdicts[name])
        assert isinstance(step.boundary(), MustAsk)
    again(rig)
    assert rig.attempt() == {"a": True, "b": True, "c": False}


def test_a_group_with_a_share_in_some_rings_only_commits_nowhere() -> None:
    whole, without = Verdict(9, 2, Outcome.COMMIT, weight=3), Verdict(9, 2, Outcome.COMMIT, weight=2, missing=(1,))
    for votes in ({0: whole, 1: without}, {0: without, 1: whole}):
        merged = merge_votes(votes, 2)
        assert merged is not None
        assert (merged.outcome, merged.reason) == (Outcome.VETO, UNEVEN)
    merged = merge_votes({0: without, 1: replace(without, weight=7)}, 2)
    assert merged is not None
    assert (merged.outcome, merged.missing, merged.weight) == (Outcome.COMMIT, (1,), 2)


def test_a_group_asks_late_if_one_of_its_ranks_does() -> None:
    ask = Ask("a", 1, Version(3, 9), 1)
    merged = merge_asks({0: ask, 1: replace(ask, heals_late=True)}, 2)
    assert isinstance(merged, Ask)
    assert merged.heals_late
