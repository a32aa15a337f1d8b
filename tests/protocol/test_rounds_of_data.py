"""`rank.Step` without data: who goes on, when a round of data ends, and that nobody is left with another state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ft_core.protocol.group.group import merge_votes
from ft_core.protocol.rank.ballot import COUNTS, ENDS_AND_SOURCE, EXHAUSTED, LAGS_AND_PASSED
from ft_core.protocol.rank.phases import Go, Heal, MustAsk
from ft_core.protocol.types import Outcome, Version
from tests.protocol.rig import Rig, new_step

if TYPE_CHECKING:
    from ft_core.protocol.rank.rank import Step


def out(step: Step, *, trails: bool = False, ends: bool = False) -> None:
    step.data.exhausted, step.data.trails, step.data.ends_for_all = True, trails, ends


def started(names: str = "abc") -> Rig:
    rig = Rig(names)
    rig.form()
    rig.attempt()
    return rig


def test_a_round_ends_for_all_at_the_version_of_the_last_commit() -> None:
    rig = started()
    out(rig["a"])
    assert rig.attempt() == dict.fromkeys("abc", True), "who is out of data may apply what the others commit"
    assert [s.data.passes for s in rig.steps.values()] == [0, 0, 0]
    for step in rig.steps.values():
        out(step)
    assert rig.attempt() == dict.fromkeys("abc", False)
    assert [(s.data.passes, s.data.ended_at, s.data.everyone_out) for s in rig.steps.values()] == [
        (1, rig["a"].base, True)
    ] * 3
    assert all(s.retries.vetoes == 0 for s in rig.steps.values()), "the end of a round is no failure"
    for step in rig.steps.values():
        step.data.exhausted = False
    assert rig.attempt() == dict.fromkeys("abc", True), "the next one begins in the same quorum"
    assert [(s.data.passes, s.data.everyone_out) for s in rig.steps.values()] == [(1, False)] * 3


def test_one_ends_the_round_for_all_with_the_step_they_are_in() -> None:
    rig = started()
    out(rig["b"], ends=True)
    assert rig.attempt() == dict.fromkeys("abc", True)
    assert {(s.data.passes, s.data.ended_at, s.data.everyone_out) for s in rig.steps.values()} == {
        (1, rig["a"].version, False)
    }


def test_who_trails_stays_where_it_is_and_is_healed_before_the_round_ends() -> None:
    rig = started()
    out(rig["a"], trails=True)
    held = rig["a"].version
    for _ in range(3):
        assert rig.attempt() == {"a": False, "b": True, "c": True}
        assert rig["a"].version == held, "what it really holds"
        assert all(isinstance(s.boundary(), Go) for s in rig.steps.values()), "no quorum per commit"
    assert rig["a"].retries.vetoes == 0
    for name in "bc":
        out(rig[name])
    rig.attempt()
    assert [s.data.passes for s in rig.steps.values()] == [0, 0, 0], "not yet"
    assert all(isinstance(s.boundary(), MustAsk) for s in rig.steps.values())
    plans = rig.form()
    assert (plans["a"].heals, plans["a"].target) == (True, rig["b"].version)
    rig.attempt()
    assert {(s.data.passes, s.version, s.lineage) for s in rig.steps.values()} == {
        (1, rig["b"].version, rig["b"].lineage)
    }


def test_who_trailed_and_has_data_again_asks_for_its_state_though_nothing_is_committed() -> None:
    """Seed 8702: the other rank of its group was equal to the others, so every attempt was vetoed, for ever."""
    rig = started()
    out(rig["a"], trails=True)
    rig.attempt()
    rig["a"].data.exhausted = rig["a"].data.trails = False
    rig["b"].soft_error = "a NaN was found"
    assert rig.attempt() == dict.fromkeys("abc", False)
    assert all(isinstance(s.boundary(), MustAsk) for s in rig.steps.values())
    assert rig.form()["a"].heals
    assert rig.attempt() == dict.fromkeys("abc", True)


@pytest.mark.parametrize("wish", ["stop", "end"])
def test_nothing_is_committed_between_the_heal_and_the_end(wish: str) -> None:
    rig = started()
    out(rig["a"], trails=True)
    rig.attempt()
    if wish == "stop":
        rig["b"].departure.stop_wanted = True
    else:
        out(rig["b"], ends=True)
    assert rig.attempt() == dict.fromkeys("abc", False), "training stops here"
    assert not rig["c"].departure.stop_agreed
    assert rig["c"].data.passes == 0
    rig.form()
    rig.attempt()
    assert {s.version for s in rig.steps.values()} == {rig["b"].version}
    assert {(s.departure.stop_agreed, s.data.passes) for s in rig.steps.values()} == {
        (wish == "stop", int(wish == "end"))
    }


def test_one_that_cannot_heal_holds_nobody() -> None:
    rig = started()
    out(rig["a"], trails=True)
    rig.attempt()
    for step in rig.steps.values():
        step.data.exhausted = True
    rig.attempt()
    rig.form(heal=False)
    rig["a"].heal_failed(rig["a"].plan.quorum_id, "no donor")  # type: ignore[union-attr]
    rig.attempt()
    assert [s.data.passes for s in rig.steps.values()] == [1, 1, 1]
    assert rig["a"].version < rig["b"].version


def test_who_held_the_last_commit_goes_on_when_the_others_are_gone() -> None:
    rig = started()
    out(rig["a"], trails=True)
    rig.attempt()
    held = rig["a"].version
    rig["a"].break_("b and c are lost")
    rig.form("a")
    assert rig.attempt("a") == {"a": False}
    assert (rig["a"].data.passes, rig["a"].version, rig["a"].data.ended_at) == (1, held, held)


def test_who_missed_the_end_learns_it_from_those_who_passed_it() -> None:
    """The last fence completed for a and b only; c asks again at the same version."""
    rig = started()
    for step in rig.steps.values():
        out(step)
    verdicts = rig.fence()
    for name in "ab":
        rig[name].settle(verdicts[name])
        rig[name].data.exhausted = False
    rig["c"].break_("its connection was lost")
    for name in "ab":
        rig[name].break_("c is lost")
    rig.form()
    assert rig.attempt() == dict.fromkeys("abc", True), "a and b are in the next round"
    assert [s.data.passes for s in rig.steps.values()] == [1, 1, 1]
    rig.attempt()
    assert [s.data.passes for s in rig.steps.values()] == [1, 1, 1], "once"
    assert len({s.data.ended_at for s in rig.steps.values()}) == 1


def test_who_was_away_learns_it_with_the_state() -> None:
    rig = started("ab")
    rig["a"].data.passes, rig["a"].data.ended_at = 4, Version(1, 7)
    rig["a"].break_("test")
    rig["b"].tear()
    rig["b"].break_("test")
    rig.form(heal=False)
    rig.receive("b")
    rig["b"].heal_applied(rig["a"].data.ended_at, 0, 0)
    assert (rig["b"].data.passes, rig["b"].data.ended_at) == (1, Version(1, 7)), "counted from its own start on"


def test_the_buffers_source_moves_on_when_it_is_out_of_data() -> None:
    rig = started()
    assert {s.source for s in rig.steps.values()} == {0}
    out(rig["a"])
    rig.attempt()
    assert all(s.data.source_lost for s in rig.steps.values()), "in this step buffers stay as they were"
    assert {s.source for s in rig.steps.values()} == {1}
    rig.attempt()
    assert not any(s.data.source_lost for s in rig.steps.values())
    out(rig["b"])
    rig.attempt()
    assert {s.source for s in rig.steps.values()} == {2}
    for step in rig.steps.values():
        step.break_("test")
    rig.form()
    assert {s.source for s in rig.steps.values()} == {0}, "a new quorum begins with the first again"


def test_the_slots() -> None:
    rig = started("ab")
    step = rig["a"]
    out(step, trails=True, ends=True)
    row = step.slots(0.0)
    assert (row[EXHAUSTED], row[ENDS_AND_SOURCE], row[LAGS_AND_PASSED]) == (1 + COUNTS, 1 + COUNTS, 0)
    step.data.ended_at = step.base
    assert step.slots(0.0)[LAGS_AND_PASSED] == COUNTS
    step.base = Version(9, 9)
    assert step.slots(0.0)[LAGS_AND_PASSED] == 1
    step.heal = Heal.ABANDONED
    row = step.slots(0.0)
    assert (row[EXHAUSTED], row[LAGS_AND_PASSED]) == (1, 0)


def test_flags_of_256_members_do_not_run_into_each_other() -> None:
    rig = Rig([f"r{i:03}" for i in range(256)])  # type: ignore[arg-type]
    rig.form(list(rig.steps))  # type: ignore[arg-type]
    for number, step in enumerate(rig.steps.values()):
        out(step, trails=number % 2 == 0)
    verdict = rig.fence(list(rig.steps))["r000"]  # type: ignore[arg-type]
    assert (verdict.outcome, verdict.exhausted) == (Outcome.VETO, True)
    rig = Rig([f"r{i:03}" for i in range(256)])  # type: ignore[arg-type]
    rig.form(list(rig.steps))  # type: ignore[arg-type]
    for step in list(rig.steps.values())[1:]:
        out(step, trails=True)
    verdict = rig.fence(list(rig.steps))["r000"]  # type: ignore[arg-type]
    assert (verdict.outcome, verdict.weight, verdict.exhausted) == (Outcome.COMMIT, 1, False)


def test_a_newcomer_that_is_behind_raises_no_flag_of_others_rounds() -> None:
    rig = started("ab")
    for step in rig.steps.values():
        step.data.passes, step.data.ended_at = 1, step.version
        step.want_change(step.plan.quorum_id, "c wants to join")  # type: ignore[union-attr]
    rig.attempt()
    rig.steps["c"] = new_step("c", lineage=9)
    rig.form()
    assert rig["c"].slots(0.0)[LAGS_AND_PASSED] == 0
    rig.fence()
    assert rig["a"].data.passes == 1


def test_who_is_healed_by_one_that_missed_the_end_learns_it_from_those_who_passed_it() -> None:
    rig = started()
    for step in rig.steps.values():
        out(step)
    rig.attempt()
    ended = rig["a"].data.ended_at
    for step in rig.steps.values():
        step.data.exhausted = False
        step.ask_next = "a change"
    rig["b"].tear()
    rig["c"].data.ended_at, rig["c"].data.passes = None, 0  # its fence of that attempt failed
    rig.form()
    rig.attempt()  # the heal, from c, tells b of no end
    assert [(step.data.ended_at, step.data.passes) for step in rig.steps.values()] == [
        (ended, 1),
        (ended, 1),
        (ended, 1),
    ]


def test_a_group_of_several_ranks_trails_as_a_whole() -> None:
    """Seed 14051: the round ended in one ring for a group that had not applied the last commit in the other."""
    groups = {rank: started("ab") for rank in range(2)}
    for step in (step for rig in groups.values() for step in rig.steps.values()):
        step.settings = replace(step.settings, group_world_size=2)
    out(groups[1]["b"], trails=True)
    held = groups[0]["b"].version
    for _ in range(2):
        votes = {rank: rig.fence() for rank, rig in groups.items()}
        for name in "ab":
            verdict = merge_votes({rank: told[name] for rank, told in votes.items()}, 2)
            assert verdict is not None
            assert verdict.outcome is Outcome.COMMIT
            assert [rig[name].settle(verdict) for rig in groups.values()] == [name == "a"] * 2
        assert all(isinstance(s.boundary(), Go) for rig in groups.values() for s in rig.steps.values())
    assert groups[0]["b"].version == held
    assert groups[0]["b"].base == groups[0]["a"].version
    out(groups[0]["a"])
    out(groups[0]["b"])
    assert groups[0].fence()["a"].change, "it is healed before the round ends"
