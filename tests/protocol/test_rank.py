"""`rank.Rank`, its steps: what each allows, and what it leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_core.errors import CollectiveError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.ballot import (
    FENCE_SLOTS,
)
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.rank.rank import Counted, Settled
from ft_core.protocol.rank.settings import RankRules
from ft_core.protocol.types import VOID, Outcome, Verdict, Version
from tests.protocol.rig import CheckedRank, Rig, kinds, new_rank, trained

NAN = on.SoftError(CollectiveError("a NaN"))


def test_three_untrained_replicas_start_from_one_state_and_all_contribute() -> None:
    rig = Rig()
    plans = rig.form()
    assert [plans[n].heals for n in "abc"] == [False, True, True]
    assert len({r.held.lineage for r in rig.ranks.values()}) == 1
    assert rig.attempt() == dict.fromkeys("abc", True)
    assert {r.held.version for r in rig.ranks.values()} == {Version(1, rig["a"].quorum_id)}
    assert rig["a"].held.batches_committed == 3
    assert [r.boundary() for r in rig.ranks.values()] == [Go()] * 3


def test_a_newcomer_sends_zeros_once_and_contributes_from_the_next_attempt() -> None:
    rig = trained("ab")
    rig.all(on.ChangePending(rig["a"].quorum_id, "c wants to join"))
    rig.attempt()
    rig.ranks["c"] = new_rank("c", lineage=9)
    rig.form()
    assert not rig["c"].attempt.participating
    verdict = rig.count()["a"]
    assert (verdict.weight, verdict.contributors, verdict.healed) == (2, 2, True)
    assert rig.settle() == dict.fromkeys("abc", True)
    assert rig.count()["c"].contributors == 3
    assert rig["c"].attempt.participants == (0, 1, 2)


def test_boundary_says_why() -> None:
    rig = Rig("ab")
    assert rig["a"].boundary() == MustAsk("joining", failed=False)
    rig.form()
    assert rig["a"].boundary() == Go()
    rig["a"].may_launch(0.0)
    launched = MustAsk(
        "start_quorum was called while collectives of the last attempt had no completed fence", failed=True
    )
    assert [rig["a"].boundary(), rig["a"].boundary()] == [launched] * 2, "asking again gives the same answer"
    rig = Rig("ab")
    rig.form()
    rig.count()
    assert rig["a"].boundary() == MustAsk(
        "the last attempt was agreed by everybody but should_commit was not called for it", failed=True
    )


def test_a_boundary_also_ends_an_attempt_that_was_voted_on() -> None:
    """The group's answer did not come, and the script goes on all the same."""
    rig = Rig(group_world_size=2)
    rig.form()
    rig.count()
    rank = rig["a"]
    rank.own_vote()
    rig.handle("a", on.MemberLost(rank.quorum_id, ("b",)))
    assert rank.phase is Phase.COUNTED
    assert rank.boundary().failed  # type: ignore[union-attr]
    assert (rank.phase, rank.attempt.verdict) == (Phase.BROKEN, None)


@pytest.mark.parametrize("counted", [False, True])
def test_without_r4_an_attempt_that_was_skipped_is_forgotten(counted: bool) -> None:
    rig = Rig("ab", rules=RankRules(r4_aligned=False))
    rig.form()
    rig.count() if counted else rig.sums()
    rig["a"].own_vote()
    assert rig["a"].boundary() == Go()
    assert rig["a"].phase is Phase.OPEN


def test_a_verdict_is_latched_and_a_later_push_only_asks() -> None:
    rig = Rig("ab")
    rig.form()
    verdict, rank = rig.count()["a"], rig["a"]
    lost = on.MemberLost(verdict.quorum_id, ("b",))
    assert rank.handle(lost, 0.0) == (do.AbortUserGroup(verdict.quorum_id),)
    assert rank.count([0.0] * FENCE_SLOTS, 0.0) == Counted(verdict, ())
    assert rank.settle(verdict) == Settled(commit=True, actions=())
    assert rank.boundary() == MustAsk("lost b", failed=False)
    assert rank.handle(lost, 0.0) == (), "nothing is launched and the next boundary asks"
    assert rank.phase is Phase.OPEN


def test_a_broken_member_launches_nothing_and_commits_nothing() -> None:
    rig = Rig("ab")
    rig.form()
    rank = rig["a"]
    quorum_id = rank.quorum_id
    assert rank.handle(on.MemberLost(quorum_id, ("b",)), 0.0) == (
        do.Abort(quorum_id),
        do.TellGroup(quorum_id, "lost b"),
    )
    assert not rank.may_launch(0.0)
    assert not rank.may_launch_user_op()
    verdict = Verdict(quorum_id, 0, Outcome.BROKEN, "lost b")
    assert rank.count([0.0] * FENCE_SLOTS, 0.0) == Counted(verdict, ())
    assert rank.own_vote() == verdict
    assert rank.settle(verdict) == Settled(commit=False, actions=(do.Abort(quorum_id),))
    assert rank.boundary() == MustAsk("lost b", failed=True)


def test_an_error_reported_after_the_fence_was_launched_breaks_its_reporter_alone() -> None:
    rig = Rig("ab")
    rig.form()
    sums = rig.sums()
    rig.handle("a", NAN)
    mine, theirs = rig["a"].count(sums, 0.0), rig["b"].count(sums, 0.0)
    assert (mine.verdict.outcome, theirs.verdict.outcome) == (Outcome.BROKEN, Outcome.COMMIT)
    reason = "reported too late to veto the others: CollectiveError: a NaN"
    assert mine.verdict.reason == reason
    assert mine.actions == (do.Abort(rig["a"].quorum_id), do.TellGroup(rig["a"].quorum_id, reason))
    rig.handle("b", NAN)
    assert (rig["b"].phase, rig["b"].broken_reason) == (Phase.BROKEN, reason)


def test_without_r0_a_late_error_skips_what_the_others_commit() -> None:
    rig = Rig("ab", rules=RankRules(r0_verdict=False))
    rig.form()
    sums = rig.sums()
    rig.handle("a", NAN)
    assert [rig[n].count(sums, 0.0).verdict.outcome for n in "ab"] == [Outcome.COMMIT] * 2
    assert rig.settle() == {"a": False, "b": True}


def test_after_its_vote_a_rank_follows_its_group_whatever_fails() -> None:
    """Found as I6: one rank applied the commit, the other reported late; the group's whole state became worthless."""
    rig = Rig("ab", group_world_size=2)
    rig.form()
    rig.count()
    rank = rig["a"]
    vote = rank.own_vote()
    assert vote.outcome is Outcome.COMMIT
    assert rig.handle("a", NAN) == ()
    assert rig.handle("a", on.CollectiveFailed(CollectiveError("a bucket, late"))) == ()
    assert not rank.may_launch(0.0), "the attempt is over"
    told = do.TellGroup(vote.quorum_id, "a bucket, late")
    assert rank.settle(vote) == Settled(commit=True, actions=(told, do.Abort(vote.quorum_id)))
    assert rank.boundary() == Go(), "the group's other rank has not heard of it"
    assert rank.own_vote().reason == "a bucket, late"
    rig.fail("b", "a bucket failed")
    assert rig["b"].own_vote().outcome is Outcome.BROKEN


def test_the_groups_answer_may_break_what_this_rank_voted_for() -> None:
    rig = Rig("ab", group_world_size=2)
    rig.form()
    rig.count()
    rank = rig["a"]
    vote = rank.own_vote()
    rig.handle("a", on.MemberLost(vote.quorum_id, ("b",)))
    broken = replace(vote, outcome=Outcome.BROKEN, reason="rank 1 says so")
    assert rank.settle(broken) == Settled(commit=False, actions=(do.Abort(vote.quorum_id),))
    assert rank.boundary() == MustAsk("rank 1 says so", failed=True)


def test_a_vote_says_why_nothing_came() -> None:
    rank = new_rank("a")
    assert rank.own_vote() == Verdict(0, 0, Outcome.BROKEN, "there was no quorum")
    rig = Rig("ab")
    rig.form()
    quorum_id = rig["a"].quorum_id
    assert rig["a"].own_vote() == Verdict(quorum_id, 0, Outcome.BROKEN, "the fence was never launched")
    rig.handle("a", NAN)
    assert rig["a"].own_vote().reason == "a NaN"
    assert rig["a"].settle(rig["a"].own_vote()) == Settled(commit=False, actions=(do.Abort(quorum_id),))
    assert rig["a"].broken_reason == "a NaN"


def test_what_went_wrong_is_known_until_the_next_step_begins() -> None:
    rig = trained("ab")
    rig.handle("a", NAN)
    assert str(rig["a"].error) == "a NaN"
    rig.attempt()
    assert str(rig["a"].error) == "a NaN", "should_commit returned False: this says why"
    assert rig["a"].boundary() == Go()
    assert rig["a"].error is None
    rig.fail("a", "first")
    rig.handle("a", NAN)
    assert str(rig["a"].error) == "first"
    assert rig["a"].boundary().failed  # type: ignore[union-attr]
    assert str(rig["a"].error) == "first"
    rig.fail("b")
    rig.form()
    assert rig["a"].error is None


def test_stop_and_leave_reach_everybody() -> None:
    rig = Rig()
    rig.form()
    rig.handle("b", on.StopWanted())
    assert rig.attempt() == dict.fromkeys("abc", True)
    assert [r.departure.stop_agreed for r in rig.ranks.values()] == [True] * 3
    rig = Rig()
    rig.form()
    rig.handle("b", on.LeaveWanted())
    rig.attempt()
    assert rig["a"].boundary() == MustAsk("a member asked for a change of membership", failed=False)


def test_max_retries_counts_a_members_own_failures_first() -> None:
    rig = Rig("ab", max_retries=2)
    rig.form()
    for _ in range(3):
        rig.handle("b", NAN)
        rig.attempt()
    assert rig["b"].gave_up() == "3 attempts in a row failed on this replica (max_retries=2)"
    assert rig["a"].gave_up() == ""
    for _ in range(2):
        rig.handle("b", NAN)
        rig.attempt()
    assert rig["a"].gave_up() == "5 attempts in a row were not committed (max_retries=2)"
    rig.fail()
    rig.form()
    assert rig["a"].gave_up() == "", "the others' counters reset with the new quorum"


def test_a_member_that_can_never_heal_gives_up_in_the_end() -> None:
    rig = trained("ab", max_retries=2)
    rig.fail()
    rig.ranks["c"] = new_rank("c", max_retries=2)
    for _ in range(3):
        rig.form(heal=False)
        rig.handle("c", on.ReceiveFailed(rig["c"].quorum_id, CollectiveError("no donor")))
        assert rig.attempt() == {"a": True, "b": True, "c": False}
    assert rig["c"].gave_up() == "3 attempts in a row failed on this replica (max_retries=2)"


def test_a_torn_member_is_void_until_it_is_healed() -> None:
    rig = trained("ab")
    rig.fail()
    rig.handle("b", on.StateTorn())
    plans = rig.form(heal=False)
    assert rig["b"].held.version == VOID
    assert plans["b"].heals
    assert not rig["b"].attempt.contributes
    rig.handle("b", on.StateReceived(rig["b"].quorum_id), on.StateApplied(None, 7, 3))
    assert rig["b"].held.version == rig["a"].held.version
    assert (rig["b"].held.batches_committed, rig["b"].held.commit_weight) == (7, 3), "the donor's"


def test_what_was_not_written_over_is_held_as_before() -> None:
    rank = trained("ab")["a"]
    held = rank.held.version
    rank.handle(on.StateTorn(), 0.0)
    rank.handle(on.StateUntouched(held), 0.0)
    assert (rank.held.version, rank.attempt.behind) == (held, False)
    without = trained("ab", rules=RankRules(r7_void=False))["a"]
    without.handle(on.StateTorn(), 0.0)
    assert without.held.version.step == 1


def test_collectives_of_the_user_are_expected_as_often_as_they_come() -> None:
    rig = Rig()
    rig.form()
    rank = rig["a"]
    expected = [rank.attempt.expects_user_op]
    for calls in (True, True, False, False):
        if calls:
            assert all(r.may_launch_user_op() for r in rig.ranks.values())
        assert rank.attempt.idle is not calls
        expected.append(rank.attempt.expects_user_op)
        rig.attempt()
    assert expected == [False, True, True, True, False]


def test_who_leaves_a_broken_quorum_hands_over_what_only_it_may_hold() -> None:
    rank = trained()["a"]
    assert rank.hands_over() is None, "its quorum stands: the last fence tells"
    rank.handle(on.CollectiveFailed(CollectiveError("a peer died")), 0.0)
    assert rank.hands_over() == MustAsk("a peer died", failed=True)
    rank.held.stable = rank.held.version
    assert rank.hands_over() is None, "all hold it"
    rank.held.stable = VOID
    rank.handle(on.StateTorn(), 0.0)
    assert rank.hands_over() is None, "it holds nothing"
    assert new_rank("a").hands_over() is None, "it was in no quorum"
    for rig in (trained("a"), trained(group_world_size=2)):
        rig.fail("a")
        assert rig["a"].hands_over() is None, "nobody else is there; a group of several ranks asks no more"


def test_what_is_planned_for_another_quorum_is_refused() -> None:
    rig = Rig("ab")
    rig.form(heal=False)
    stale = CollectiveError("stale")
    for event in (on.StateReceived(12345), on.GroupsUp(12345), on.ReceiveFailed(12345, stale, final=True)):
        assert rig.handle("b", event) == ()
    assert rig["b"].attempt.heal is Heal.PENDING
    assert rig.handle("a", on.MemberLost(12345, ("b",))) == ()
    assert rig["a"].phase is Phase.OPEN


@pytest.mark.parametrize("again", [False, True])
def test_members_whose_states_differ_commit_nothing_and_the_minority_heals(again: bool) -> None:
    rig = trained()
    for number, rank in enumerate(rig.ranks.values()):
        rank.sampled(int(number == 2))
        if again:
            rig.handle(rank.settings.replica_id, on.DifferenceTolerated())
    verdicts = rig.count()
    assert [r.attempt.states_differ for r in rig.ranks.values()] == [not again] * 3
    for name, verdict in verdicts.items():
        assert rig.handle(name, on.StatesDiffer(verdict, "c differs", mine=name == "c")) == ()
    assert rig.settle() == dict.fromkeys("abc", False)
    assert [r.boundary() for r in rig.ranks.values()] == [MustAsk("c differs", failed=False)] * 3
    assert [rank for rank, plan in enumerate(rig.form().values()) if plan.heals] == [2]


def test_what_a_push_has_broken_meanwhile_is_not_vetoed_for_its_state() -> None:
    rig = trained(rules=RankRules(r0_verdict=False))
    verdict = rig.count()["a"]
    rig.handle("a", on.MemberLost(verdict.quorum_id, ("b",)), on.StatesDiffer(verdict, "a differs", mine=True))
    assert (rig["a"].phase, rig["a"].ask_next, rig["a"].held.version.step) == (Phase.BROKEN, "", 1)


def test_repr() -> None:
    rig = Rig("ab")
    assert repr(rig["a"]) == "Rank(step 0, outside, Attempt(none on step 0, heal=none))"
    rig.form()
    rig.fail("a", "b is lost")
    assert repr(rig["a"]) == "Rank(step 0, broken, Attempt(0x200000007.0 on step 0, heal=none), b is lost)"
    assert Verdict(1, 2, Outcome.VETO).reason == ""


def test_a_drain_is_told_to_the_group_and_acted_on_when_the_group_has_agreed() -> None:
    rig = Rig("ab")
    rig.form()
    drain = on.DrainOrdered("maintenance")
    assert rig.handle("a", drain) == (do.Report("asked to drain: maintenance"),)
    assert rig.handle("a", on.DrainOrdered("again")) == ()
    rig.count()
    assert [rig[n].own_vote().drain for n in "ab"] == [True, False]
    assert not rig["a"].departure.drain_agreed
    for name in "ab":  # b is another rank of the same group
        rig[name].settle(replace(rig[name].own_vote(), drain=True))
        assert rig[name].departure.drain_agreed
        assert rig[name].boundary() == Go()
    broken = Rig("ab")
    broken.form()
    broken.handle("a", drain)
    broken.fail("a", "a bucket failed")
    assert not broken["a"].own_vote().drain


def test_before_the_first_quorum() -> None:
    rank = new_rank("a")
    rank.require_whole_steps()
    rank.handle(on.Restored(Version(5, 9), 77, 40), 0.0)
    assert (rank.held.version, rank.held.lineage, rank.held.batches_committed) == (Version(5, 9), 77, 40)
    assert (rank.attempt.whole_steps, rank.held.restored, rank.quorum, rank.quorum_id) == (True, True, None, 0)
    assert (rank.attempt.participants, rank.attempt.source, rank.attempt.participating) == ((), -1, False)


# ---------------------------------------------------------------- members that leave


def left(rank: CheckedRank, held: Version, *names: str) -> do.Actions:
    return rank.handle(on.MemberLost(rank.quorum_id, names or ("b",), held), 0.0)


def test_who_has_left_is_told_when_nothing_is_under_way_here_that_it_waits_for() -> None:
    """R16: it keeps its connections open meanwhile. Who leaves with the commit of this attempt has sent its part."""
    rig = trained()
    quorum_id = rig["a"].quorum_id
    older, newer = rig["a"].attempt.base, Version(2, quorum_id)
    idle = left(rig["a"], older, "b", "c")
    assert idle == (do.CancelReceive(), do.TellGroup(quorum_id, "left by b, c"), do.TellParted(quorum_id, (1, 2)))
    rig = trained()
    sums = rig.sums()
    rank = rig["a"]
    assert left(rank, newer) == (), "its ballot of this attempt arrives"
    assert rank.count(sums, 0.0).verdict.outcome is Outcome.COMMIT
    assert left(rank, newer, "c") == (do.TellParted(quorum_id, (1, 2)),)
    assert rank.settle(rank.own_vote()) == Settled(commit=True, actions=())
    assert rank.boundary() == MustAsk("left by b", failed=False)


def test_a_script_that_waits_for_who_has_left_is_ended() -> None:
    rig = trained()
    rank = rig["a"]
    assert rank.may_launch_user_op()
    assert kinds(left(rank, rank.attempt.base)) == ["Abort", "TellGroup", "TellParted"]
    rig = trained()
    rig.sums()
    rank = rig["a"]
    assert kinds(left(rank, rank.attempt.base)) == ["Abort", "TellGroup", "TellParted"], "not in this attempt any more"
    rig = trained()
    rig.count()
    rank = rig["a"]
    assert kinds(left(rank, rank.attempt.base)) == ["AbortUserGroup", "TellParted"]


def test_what_is_still_under_way_when_the_attempt_ends_is_told_then() -> None:
    rig = trained()
    rig.sums()
    rank = rig["a"]
    newer = Version(2, rank.quorum_id)
    assert left(rank, newer) == ()
    assert kinds(rank.handle(on.CollectiveFailed(CollectiveError("c died")), 0.0)) == ["Abort", "TellGroup"]
    assert rank.settle(rank.own_vote()).actions == (do.TellParted(rank.quorum_id, (1,)), do.Abort(rank.quorum_id))
    assert rank.parted == ()


def test_without_r16_a_goodbye_is_a_loss() -> None:
    rig = trained(rules=RankRules(r16_parting=False))
    rig.sums()
    rank = rig["a"]
    assert kinds(left(rank, Version(2, rank.quorum_id))) == ["Abort", "TellGroup", "TellParted"]


def test_a_rank_that_drains_and_broke_ends_nothing_more() -> None:
    """Whoever it waited with was told when it broke; it leaves now."""
    rig = trained(exits_on_drain=True)
    rig.handle("a", on.DrainOrdered("maintenance"))
    rig.fail("a", "c died")
    assert rig["a"].settle(rig["a"].own_vote()) == Settled(commit=False, actions=())


def test_a_collective_waits_for_longer_while_somebody_is_paused() -> None:
    rank = trained()["a"]
    assert rank.overdue(60.0, 100.0) is None
    rank.handle(on.Paused(rank.quorum_id, "b", 30.0), 100.0)
    rank.handle(on.Paused(1, "c", 500.0), 100.0)
    assert rank.overdue(60.0, 110.0) == 130.0, "c's pause is of another quorum"
    rank.handle(on.Paused(rank.quorum_id, "b", 0.0), 120.0)
    assert (rank.overdue(60.0, 121.0), rank.overdue(60.0, 180.0)) == (180.0, None)
