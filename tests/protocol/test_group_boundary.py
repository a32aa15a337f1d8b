"""R12 at the boundary: the ranks of a group go on, or ask, together, whatever one of them learnt since the vote."""

from __future__ import annotations

from ft_core.errors import CollectiveError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import Go, MustAsk, Phase
from ft_core.protocol.rank.rank import Settled
from ft_core.protocol.rank.settings import RankRules
from ft_core.protocol.types import Outcome, Verdict
from tests.protocol.rig import CheckedRank, Rig, only, trained, wish


def ranks(rules: RankRules | None = None) -> CheckedRank:
    """A rank of a group of two, after a committed step."""
    return trained(group_world_size=2, rules=rules or RankRules())["a"]


def loses_b(rank: CheckedRank) -> do.Actions:
    return rank.handle(on.MemberLost(rank.quorum_id, ("b",)), 0.0)


def test_what_broke_since_the_vote_is_told_in_the_next_one() -> None:
    rank = ranks()
    loses_b(rank)
    assert rank.phase is Phase.BROKEN
    assert [rank.boundary(), rank.boundary()] == [Go()] * 2, "asked again before anything was launched"
    assert str(rank.error) == "lost b", "nothing that is launched now has a result"
    assert not rank.may_launch(0.0)
    verdict = rank.own_vote()
    assert verdict == Verdict(rank.quorum_id, 1, Outcome.BROKEN, "lost b")
    assert rank.settle(verdict) == Settled(commit=False, actions=(do.Abort(rank.quorum_id),))
    assert rank.boundary() == MustAsk("lost b", failed=True)


def counted() -> CheckedRank:
    rig = Rig(group_world_size=2)
    rig.form()
    assert {v.outcome for v in rig.count().values()} == {Outcome.COMMIT}
    return rig["a"]


def test_a_loss_learnt_before_the_vote_is_told_in_it() -> None:
    rank = counted()
    assert loses_b(rank) == (do.AbortUserGroup(rank.quorum_id),)
    told = rank.own_vote()
    assert (told.outcome, told.change) == (Outcome.COMMIT, True)
    assert rank.settle(told) == Settled(commit=True, actions=())
    assert rank.boundary() == MustAsk("lost b", failed=False)


def test_a_loss_learnt_between_vote_and_answer_waits_for_the_next_vote() -> None:
    rank = counted()
    told = rank.own_vote()
    assert not told.change
    assert loses_b(rank) == (do.AbortUserGroup(rank.quorum_id),)
    # As the others of the group do, who have not learnt of it.
    told_on = do.TellGroup(rank.quorum_id, "lost b")
    assert rank.settle(told) == Settled(commit=True, actions=(told_on, do.Abort(rank.quorum_id)))
    assert rank.boundary() == Go()
    assert not rank.may_launch(0.0)
    assert rank.own_vote() == Verdict(rank.quorum_id, 1, Outcome.BROKEN, "lost b")


def test_alone_a_loss_learnt_after_the_vote_makes_the_next_boundary_ask() -> None:
    rig = Rig()
    rig.form()
    rig.count()
    rank = rig["a"]
    told = rank.own_vote()
    loses_b(rank)
    assert rank.settle(told) == Settled(commit=True, actions=())
    assert rank.boundary() == MustAsk("lost b", failed=False)


def test_a_vote_that_was_skipped_ends_the_agreement() -> None:
    rank = ranks()
    rank.may_launch(0.0)
    rank.handle(on.CollectiveFailed(CollectiveError("its collective failed")), 0.0)
    assert rank.boundary() == MustAsk("its collective failed", failed=True)


def test_an_ask_of_the_scripts_ends_the_agreement() -> None:
    """All ranks of the group change the room: one that gets no quorum has nothing to wait for in a vote."""
    rank = ranks()
    room = MustAsk("changing to room 2", failed=False)
    ask = only(rank.handle(on.QuorumWanted(wish(timeout_s=5.0), room), 0.0), do.SendAsk).ask
    assert (ask.reason, ask.failed) == ("changing to room 2", False)
    rank.handle(on.Tick(), 5.0)
    assert rank.boundary() == MustAsk("no quorum within 5 s (quorum_timeout): the lighthouse gave no reason", True)


def test_without_the_rule_one_rank_asks_alone() -> None:
    rank = ranks(RankRules(r12_alike=False))
    loses_b(rank)
    assert rank.boundary() == MustAsk("lost b", failed=True)


def test_a_group_of_one_asks_at_once() -> None:
    rank = trained()["a"]
    loses_b(rank)
    assert rank.boundary() == MustAsk("lost b", failed=True)
