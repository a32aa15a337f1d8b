"""R17: everybody knows whose share of a committed step is in it; and who cannot be healed costs the others one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ft_core.errors import CollectiveError
from ft_core.protocol.group.merge import UNEVEN, merge_asks, merge_votes
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import MustAsk
from ft_core.protocol.types import Ask, Outcome, Verdict, Version
from tests.protocol.rig import Rig, new_rank, trained


def with_a_failed_heal(names: str = "abc", **more: Any) -> Rig:
    """A synchronous quorum at step 1 in which the last member is planned to contribute, and cannot be healed."""
    rig = trained(names[:-1], **more)
    rig.fail()
    rig.ranks[names[-1]] = new_rank(names[-1], lineage=99, **more)
    again(rig)
    return rig


def again(rig: Rig) -> None:
    """All ask for the next quorum; the last one's heal fails in it."""
    rig.form(heal=False, heals_before_forward=True)
    cannot_heal(rig, [*rig.ranks][-1])


def cannot_heal(rig: Rig, name: str) -> None:
    rig.handle(name, on.ReceiveFailed(rig[name].quorum_id, CollectiveError("no donor")))


def test_zeros_of_a_planned_participant_are_seen_by_all() -> None:
    rig = with_a_failed_heal()
    assert rig["a"].attempt.participants == (0, 1, 2)
    verdicts = rig.count()
    assert {(v.outcome, v.missing, v.contributors, v.weight) for v in verdicts.values()} == {
        (Outcome.COMMIT, (2,), 2, 2)
    }
    assert rig.settle() == {"a": True, "b": True, "c": False}
    assert (rig["a"].held.commit_weight, rig["c"].held.commit_weight) == (2, 0)


def test_it_is_not_counted_on_again_until_it_is_healed() -> None:
    rig = with_a_failed_heal()
    rig.attempt()
    for _ in range(3):
        again(rig)
        plan = rig["c"].plan
        assert plan is not None
        assert (rig["a"].attempt.participants, plan.heals_first) == ((0, 1), False)
        assert rig.count()["a"].missing == ()
        rig.settle()
    rig.form(heals_before_forward=True)
    assert rig.attempt() == dict.fromkeys("abc", True)
    assert rig["a"].attempt.participants == (0, 1, 2)
    assert not rig["c"].heals_late
    rig.fail()
    assert rig.form(heals_before_forward=True)["c"].participants == (0, 1, 2)


def test_also_untrained() -> None:
    rig = Rig()
    again(rig)
    rig.handle("b", on.StateReceived(rig["b"].quorum_id), on.StateApplied(None, 0, 0))
    assert rig.count()["a"].missing == (2,)
    for rank in rig.ranks.values():
        rank.settle(replace(rank.own_vote(), outcome=Outcome.VETO))
    rig.fail("a")
    again(rig)
    assert rig["a"].attempt.participants == (0, 1)


def test_empty_shares_are_not_missing() -> None:
    """A filler of the elastic loader, and who has run out of data, whether it follows the commits or not."""
    rig = Rig()
    rig.form()
    rig["a"].weigh(0)
    rig.handle("b", on.DataEnded(applies=False, ends=False))
    for _ in range(2):
        verdict = rig.count()["c"]
        assert (verdict.outcome, verdict.missing, verdict.contributors) == (Outcome.COMMIT, (), 1)
        rig.settle()


def test_who_leaves_gives_up_its_share() -> None:
    rig = Rig()
    rig.form()
    rig.handle("b", on.LeaveWanted(), on.DataEnded(applies=True, ends=False))  # as Manager.leave does
    assert rig.count()["a"].missing == (1,)


def test_places_are_those_among_the_participants() -> None:
    rig = with_a_failed_heal("bcd")
    rig.ranks["a"] = new_rank("a", lineage=98)
    rig["a"].heals_late = True
    rig.fail()
    rig.form(heal=False, heals_before_forward=True)
    cannot_heal(rig, "d")
    assert rig["b"].attempt.participants == (1, 2, 3)
    assert {v.missing for v in rig.count().values()} == {(2,)}


def test_a_whole_step_is_vetoed_alike_and_the_next_quorum_goes_on() -> None:
    rig = with_a_failed_heal()
    for rank in rig.ranks.values():
        rank.require_whole_steps()
    assert {(v.outcome, v.reason) for v in rig.count().values()} == {
        (Outcome.VETO, "every step has to be whole, and c contributed nothing")
    }
    assert rig.settle() == dict.fromkeys("abc", False)
    assert all(isinstance(rank.boundary(), MustAsk) for rank in rig.ranks.values())
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
