"""`rank.Rank` without data: who goes on, when a pass over the data ends, and that nobody is left with another state."""

from __future__ import annotations

import pytest

from ft_core.errors import CollectiveError
from ft_core.protocol.group.merge import merge_votes
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.ballot import COUNTS, ENDS_AND_SOURCE, EXHAUSTED, LAGS_AND_PASSED
from ft_core.protocol.rank.phases import Go, Heal, MustAsk
from ft_core.protocol.types import Outcome, Version
from tests.protocol.rig import Rig, new_rank, trained

MANY = 300
CHANGE = MustAsk("a member asked for a change of membership", failed=False)


def out(*, trails: bool = False, ends: bool = False) -> on.DataEnded:
    return on.DataEnded(applies=not trails, ends=ends)


def passes(rig: Rig) -> list[int]:
    return [rank.data.passes for rank in rig.ranks.values()]


def test_a_round_ends_for_all_at_the_version_of_the_last_commit() -> None:
    rig = trained()
    rig.handle("a", out())
    assert rig.attempt() == dict.fromkeys("abc", True), "who is out of data may apply what the others commit"
    assert passes(rig) == [0, 0, 0]
    rig.all(out())
    assert rig.attempt() == dict.fromkeys("abc", False)
    assert [(r.data.passes, r.data.ended_at, r.data.everyone_out) for r in rig.ranks.values()] == [
        (1, rig["a"].attempt.base, True)
    ] * 3
    assert [r.retries.vetoes for r in rig.ranks.values()] == [0, 0, 0], "the end of a pass is no failure"
    rig.all(on.DataBack())
    assert rig.attempt() == dict.fromkeys("abc", True), "the next one begins in the same quorum"
    assert [(r.data.passes, r.data.everyone_out) for r in rig.ranks.values()] == [(1, False)] * 3


def test_one_ends_the_round_for_all_with_the_step_they_are_in() -> None:
    rig = trained()
    rig.handle("b", out(ends=True))
    assert rig.attempt() == dict.fromkeys("abc", True)
    assert {(r.data.passes, r.data.ended_at, r.data.everyone_out) for r in rig.ranks.values()} == {
        (1, rig["a"].held.version, False)
    }


def test_who_trails_stays_where_it_is_and_is_healed_before_the_round_ends() -> None:
    rig = trained()
    rig.handle("a", out(trails=True))
    held = rig["a"].held.version
    for _ in range(3):
        assert rig.attempt() == {"a": False, "b": True, "c": True}
        assert rig["a"].held.version == held, "what it really holds"
        assert [r.boundary() for r in rig.ranks.values()] == [Go()] * 3, "no quorum per commit"
    assert rig["a"].retries.vetoes == 0
    rig.all(out(), "bc")
    rig.attempt()
    assert passes(rig) == [0, 0, 0], "not yet"
    assert [r.boundary() for r in rig.ranks.values()] == [CHANGE] * 3
    plans = rig.form()
    assert (plans["a"].heals, plans["a"].target) == (True, rig["b"].held.version)
    rig.attempt()
    assert {(r.data.passes, r.held.version, r.held.lineage) for r in rig.ranks.values()} == {
        (1, rig["b"].held.version, rig["b"].held.lineage)
    }


def test_who_trailed_and_has_data_again_asks_for_its_state_though_nothing_is_committed() -> None:
    """Seed 8702: the other rank of its group was equal to the others, so every attempt was vetoed, for ever."""
    rig = trained()
    rig.handle("a", out(trails=True))
    rig.attempt()
    rig.handle("a", on.DataBack())
    rig.handle("b", on.SoftError(ValueError("a NaN was found")))
    assert rig.attempt() == dict.fromkeys("abc", False)
    assert [r.boundary() for r in rig.ranks.values()] == [CHANGE] * 3
    assert rig.form()["a"].heals
    assert rig.attempt() == dict.fromkeys("abc", True)


@pytest.mark.parametrize("wish", ["stop", "end"])
def test_nothing_is_committed_between_the_heal_and_the_end(wish: str) -> None:
    rig = trained()
    rig.handle("a", out(trails=True))
    rig.attempt()
    rig.handle("b", on.StopWanted() if wish == "stop" else out(ends=True))
    assert rig.attempt() == dict.fromkeys("abc", False), "training stops here"
    assert not rig["c"].departure.stop_agreed
    assert rig["c"].data.passes == 0
    rig.form()
    rig.attempt()
    assert {r.held.version for r in rig.ranks.values()} == {rig["b"].held.version}
    assert {(r.departure.stop_agreed, r.data.passes) for r in rig.ranks.values()} == {
        (wish == "stop", int(wish == "end"))
    }


def test_one_that_cannot_heal_holds_nobody() -> None:
    rig = trained()
    rig.handle("a", out(trails=True))
    rig.attempt()
    rig.all(out(), "bc")
    rig.attempt()
    rig.form(heal=False)
    rig.handle("a", on.ReceiveFailed(rig["a"].quorum_id, CollectiveError("no donor")))
    rig.attempt()
    assert passes(rig) == [1, 1, 1]
    assert rig["a"].held.version < rig["b"].held.version


def test_who_held_the_last_commit_goes_on_when_the_others_are_gone() -> None:
    rig = trained()
    rig.handle("a", out(trails=True))
    rig.attempt()
    held = rig["a"].held.version
    rig.fail("a", "b and c are lost")
    rig.form("a")
    assert rig.attempt("a") == {"a": False}
    assert (rig["a"].data.passes, rig["a"].held.version, rig["a"].data.ended_at) == (1, held, held)


def test_who_missed_the_end_learns_it_from_those_who_passed_it() -> None:
    """The last fence completed for a and b only; c asks again at the same version."""
    rig = trained()
    rig.all(out())
    sums = rig.sums()
    for name in "ab":
        rig[name].settle(rig[name].count(sums, 0.0).verdict)
        rig.handle(name, on.DataBack())
    rig.fail("c", "its connection was lost")
    rig.fail("ab", "c is lost")
    rig.form()
    assert rig.attempt() == dict.fromkeys("abc", True), "a and b are in the next pass"
    assert passes(rig) == [1, 1, 1]
    rig.attempt()
    assert passes(rig) == [1, 1, 1], "once"
    assert len({r.data.ended_at for r in rig.ranks.values()}) == 1


def test_who_was_away_learns_it_with_the_state() -> None:
    rig = trained("ab")
    rig.fail()
    rig.handle("b", on.StateTorn())
    rig.form(heal=False)
    rig.handle("b", on.StateReceived(rig["b"].quorum_id), on.StateApplied(Version(1, 7), 0, 0))
    assert (rig["b"].data.passes, rig["b"].data.ended_at) == (1, Version(1, 7)), "counted from its own start on"


def test_the_buffers_source_moves_on_when_it_is_out_of_data() -> None:
    rig = trained()
    sources = [{r.attempt.source for r in rig.ranks.values()}]
    rig.handle("a", out())
    rig.attempt()
    assert [r.data.source_lost for r in rig.ranks.values()] == [True] * 3, "in this step buffers stay as they were"
    sources.append({r.attempt.source for r in rig.ranks.values()})
    rig.attempt()
    assert [r.data.source_lost for r in rig.ranks.values()] == [False] * 3
    rig.handle("b", out())
    rig.attempt()
    sources.append({r.attempt.source for r in rig.ranks.values()})
    rig.fail()
    rig.form()
    sources.append({r.attempt.source for r in rig.ranks.values()})
    assert sources == [{0}, {1}, {2}, {0}], "a new quorum begins with the first again"


def test_the_slots() -> None:
    rig = trained("ab")
    rank = rig["a"]
    rig.handle("a", out(trails=True, ends=True))
    row = rank.ballot(0.0)
    assert (row[EXHAUSTED], row[ENDS_AND_SOURCE], row[LAGS_AND_PASSED]) == (1 + COUNTS, 1 + COUNTS, 0)
    rank.data.ended_at = rank.attempt.base
    assert rank.ballot(0.0)[LAGS_AND_PASSED] == COUNTS
    rank.attempt.base = Version(9, 9)
    assert rank.ballot(0.0)[LAGS_AND_PASSED] == 1
    rank.attempt.heal = Heal.ABANDONED  # a heal that was planned in this quorum
    row = rank.attempt.ballot(0.0, change=False)
    assert (row[EXHAUSTED], row[LAGS_AND_PASSED]) == (1, 0)


def test_flags_of_many_members_do_not_run_into_each_other() -> None:
    """Of as many as there may be: test_ballot."""
    rig = Rig(f"r{i:04}" for i in range(MANY))
    rig.form()
    for number, name in enumerate(rig.ranks):
        rig.handle(name, out(trails=number % 2 == 0))
    verdict = rig.count()["r0000"]
    assert (verdict.outcome, verdict.exhausted) == (Outcome.VETO, True)
    rig = Rig(f"r{i:04}" for i in range(MANY))
    rig.form()
    rig.all(out(trails=True), [*rig.ranks][1:])
    verdict = rig.count()["r0000"]
    assert (verdict.outcome, verdict.weight, verdict.exhausted) == (Outcome.COMMIT, 1, False)


def test_a_newcomer_that_is_behind_raises_no_flag_of_others_rounds() -> None:
    rig = trained("ab")
    rig.all(out())
    rig.attempt()
    rig.all(on.DataBack())
    rig.all(on.ChangePending(rig["a"].quorum_id, "c wants to join"))
    rig.attempt()
    rig.ranks["c"] = new_rank("c", lineage=9)
    rig.form()
    assert rig["c"].ballot(0.0)[LAGS_AND_PASSED] == 0
    rig.attempt()
    assert rig["a"].data.passes == 1


def test_who_is_healed_by_one_that_missed_the_end_learns_it_from_those_who_passed_it() -> None:
    rig = trained()
    rig.all(out())
    sums = rig.sums()
    for name in "ab":
        rig[name].settle(rig[name].count(sums, 0.0).verdict)
    ended = rig["a"].data.ended_at
    rig.fail()  # the fence of that attempt failed on c
    rig.all(on.DataBack())
    rig.handle("b", on.StateTorn())
    rig.form()
    rig.attempt()  # the heal, from c, tells b of no end
    assert [(r.data.ended_at, r.data.passes) for r in rig.ranks.values()] == [(ended, 1)] * 3


def test_a_group_of_several_ranks_trails_as_a_whole() -> None:
    """Seed 14051: the pass ended in one ring for a group that had not applied the last commit in the other."""
    rings = [trained("ab", group_world_size=2) for _ in range(2)]
    rings[1].handle("b", out(trails=True))
    held = rings[0]["b"].held.version
    for _ in range(2):
        for rig in rings:
            rig.count()
        for name in "ab":
            verdict = merge_votes({number: rig[name].own_vote() for number, rig in enumerate(rings)}, 2)
            assert verdict is not None
            assert verdict.outcome is Outcome.COMMIT
            assert [rig[name].settle(verdict).commit for rig in rings] == [name == "a"] * 2
        assert [r.boundary() for rig in rings for r in rig.ranks.values()] == [Go()] * 4
    assert rings[0]["b"].held.version == held
    assert rings[0]["b"].attempt.base == rings[0]["a"].held.version
    rings[0].all(out())
    assert rings[0].count()["a"].change, "it is healed before the pass ends"
