"""R19: an attempt that is open, and of which nothing was launched, goes on in the next quorum when a member dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ft_core.errors import CollectiveError, ConfigError, JobFinishedError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.formation import ASK_AGAIN_S
from ft_core.protocol.rank.moving import IN_TIME
from ft_core.protocol.rank.phases import Go, MustAsk, Phase
from ft_core.protocol.rank.rank import Settled
from ft_core.protocol.rank.settings import RankRules
from ft_core.protocol.types import Ask, Outcome, Version
from tests.protocol.rig import QUORUM_S, Rig, kinds, member, new_rank, only, trained, wish

OPENED = 100.0
TIMEOUT_S = 60.0
NEWCOMER = "in this quorum members need state, which is given and taken between two steps only"


def computing(rig: Rig | None = None, *, pinned: bool = False, position: int = 0) -> Rig:
    """Members that have begun their second step, and compute."""
    rig = rig or trained(timeout_s=TIMEOUT_S)
    rig.now = OPENED
    for rank in rig.ranks.values():
        rank.trains_on(position)
        assert rank.boundary() == Go()
        rank.opened(OPENED, pinned=pinned)
    return rig


def dies(rig: Rig, *, seen_by: str = "ab") -> dict[str, Ask]:
    """c dies while the others compute: what these ask for at once."""
    sent = {}
    for name in seen_by:
        quorum_id = rig[name].quorum_id
        actions = rig.handle(name, on.MemberLost(quorum_id, ("c",)))
        assert actions[:2] == (do.Abort(quorum_id), do.TellGroup(quorum_id, "lost c"))
        (last,) = actions[2:]
        assert isinstance(last, do.SendAsk)
        sent[name] = last.ask
    return sent


def test_an_attempt_that_moves_asks_at_once_and_goes_on() -> None:
    rig = Rig(timeout_s=TIMEOUT_S)
    rig.form(heals_before_forward=True, store_address="h:1")
    rig.attempt()
    computing(rig)
    version = rig["a"].held.version
    asks = dies(rig)
    ask = asks["a"]
    assert (ask.failed, ask.reason, ask.version, ask.store_address) == (True, "lost c", version, "h:1")
    assert not ask.heals_before_forward, "the step has begun: nothing is given or taken before it"
    rank = rig["a"]
    assert (rank.phase, rank.broken, rank.boundary(), str(rank.error)) == (Phase.ASKING, True, Go(), "lost c")
    quorum = rig.quorum(asks.values())
    for name in "ab":
        assert kinds(rig.answer(name, quorum)) == ["Entered", "Offer", "Configure"]
        assert (rig[name].phase, rig[name].error, rig[name].broken) == (Phase.OPEN, None, False)
    assert rig.attempt("ab") == {"a": True, "b": True}
    assert rank.held.version == Version(2, quorum.quorum_id)


@pytest.mark.parametrize("event", [on.PeerEnded, lambda quorum_id: on.MemberLost(quorum_id, ("b", "c"))])
def test_whoever_tells_of_the_death(event: Callable[[int], on.Event]) -> None:
    rig = computing()
    assert kinds(rig.handle("a", event(rig["a"].quorum_id))) == ["Abort", "TellGroup", "SendAsk"]


def test_the_script_may_reach_its_next_boundary_meanwhile() -> None:
    rig = computing()
    dies(rig)
    assert rig.handle("a", on.QuorumWanted(wish())) == ()
    assert not rig["a"].may_launch(rig.now)
    assert not rig["a"].may_launch_user_op()
    assert rig["a"].asks == 2


def _stays(rig: Rig) -> str:
    rig["a"].pin()
    return "somebody was told who takes part"


def _first(rig: Rig) -> str:
    rig.fail()
    rig.form()
    computing(rig)
    return "the first attempt of a quorum may bring collectives of the script's"


def _own(rig: Rig) -> str:
    rig["a"].may_launch_user_op()
    return "a collective of the script's was launched"


def _behind(rig: Rig) -> str:
    rig["a"].handle(on.StateTorn(), rig.now)
    return "it does not hold what the attempt builds on"


def _late(rig: Rig) -> str:
    rig.now = OPENED + IN_TIME * TIMEOUT_S
    return "the others may have given up on this very rank"


def _soft(rig: Rig) -> str:
    rig.handle("a", on.SoftError(ValueError("NaN")))
    return "it would be vetoed there"


def _leaves(rig: Rig) -> str:
    rig.handle("a", on.LeaveWanted())
    return "it leaves with this very attempt"


def _drains(rig: Rig) -> str:
    rig.handle("a", on.DrainOrdered("maintenance"))
    return "it asks for no further quorum than its own boundary's"


def _launched(rig: Rig) -> str:
    assert rig["a"].may_launch(rig.now)
    return "its gradients are on their way"


STAYS = [_stays, _first, _own, _behind, _late, _soft, _leaves, _drains, _launched]


@pytest.mark.parametrize("why", STAYS)
def test_what_stays_in_its_quorum_is_lost_with_it(why: Callable[[Rig], str]) -> None:
    rig = computing()
    reason = why(rig)
    quorum_id = rig["a"].quorum_id
    assert kinds(rig.handle("a", on.MemberLost(quorum_id, ("c",)))) == ["Abort", "TellGroup"], reason
    assert (rig["a"].phase, rig["a"].formation) == (Phase.BROKEN, None)
    assert rig["a"].boundary() == MustAsk("lost c", failed=True)


def test_who_waits_in_a_collective_learns_there_that_a_peer_ended_it() -> None:
    rig = computing()
    assert rig["a"].may_launch(rig.now)
    assert rig.handle("a", on.PeerEnded(rig["a"].quorum_id)) == ()
    assert rig["a"].phase is Phase.REDUCING


def test_who_is_shut_down_asks_for_nothing() -> None:
    rig = computing()
    assert rig.handle("a", on.ShutDown()) == ()
    assert kinds(rig.handle("a", on.PeerEnded(rig["a"].quorum_id))) == ["Abort", "TellGroup"]
    assert (rig["a"].phase, rig["a"].broken_reason) == (Phase.BROKEN, "a peer has ended its connection")
    assert str(rig["a"].failure) == "the manager was shut down while it waited for a quorum"


def test_just_in_time() -> None:
    rig = computing()
    rig.now = OPENED + IN_TIME * TIMEOUT_S - 0.1
    dies(rig)


@pytest.mark.parametrize(
    "settings", [{"rules": RankRules(r19_moves=False)}, {"rules": RankRules(r19_groups=False), "group_world_size": 2}]
)
def test_without_the_rule_the_attempt_is_lost(settings: dict[str, Any]) -> None:
    rig = computing(trained(**settings))
    assert kinds(rig.handle("a", on.MemberLost(rig["a"].quorum_id, ("c",)))) == ["Abort", "TellGroup"]


def test_a_step_that_would_go_on_and_gets_no_quorum_is_lost() -> None:
    """That the others have finished is said at the next boundary, where scripts expect it."""
    rig = computing()
    dies(rig)
    rig.handle("a", on.Refused(JobFinishedError("finished at step 9")))
    assert (rig["a"].phase, rig["a"].failed_inside) == (Phase.BROKEN, True)
    assert rig["a"].own_vote().outcome is Outcome.BROKEN
    rig = Rig()
    rig.ask("a")
    rig.handle("a", on.Refused(JobFinishedError("finished at step 9")))
    assert not rig["a"].failed_inside


# ---------------------------------------------------------------- collectives of the script's


def test_those_that_follow_the_gradients_or_the_vote_are_made_by_all_in_the_same_place() -> None:
    rig = computing()
    rig.count()
    for rank in rig.ranks.values():
        assert rank.may_launch_user_op()
    rig.settle()
    computing(rig)
    dies(rig)


def test_one_that_is_under_way_since_the_vote_ends_with_its_quorum() -> None:
    rig = trained(timeout_s=TIMEOUT_S)
    for rank in rig.ranks.values():
        rank.ended()
        assert rank.may_launch_user_op()
    computing(rig)
    assert kinds(rig.handle("a", on.MemberLost(rig["a"].quorum_id, ("c",)))) == ["Abort", "TellGroup"]


def test_one_before_the_gradients_keeps_all_later_steps_in_this_quorum() -> None:
    rig = computing()
    for rank in rig.ranks.values():
        assert rank.may_launch_user_op()
    assert all(rig.attempt().values())
    computing(rig)
    assert kinds(rig.handle("a", on.MemberLost(rig["a"].quorum_id, ("c",)))) == ["Abort", "TellGroup"]


# ---------------------------------------------------------------- where the members are in their data


ELSEWHERE = "in this quorum members go on at another batch of their data, which is begun with a step only"


def asks_at(rig: Rig, name: str, position: int, **wanted: Any) -> Ask:
    """It lost its attempt, and asks at its next boundary."""
    rig.fail(name)
    rig[name].settle(rig[name].own_vote())
    rig[name].ended()
    rig[name].trains_on(position)
    return rig.ask(name, **wanted)


def moved_beside(position: int, **rules: bool) -> tuple[Rig, list[str]]:
    """a was at batch 7 when c died, and goes on; b asks with `position`. What a is told to do with the answer."""
    rig = computing(trained(timeout_s=TIMEOUT_S, rules=RankRules(**rules)), position=7)
    asks = [dies(rig, seen_by="a")["a"], asks_at(rig, "b", position)]
    assert [ask.position for ask in asks] == [7, position]
    quorum = rig.quorum(asks)
    answered = kinds(rig.answer("a", quorum))
    rig.answer("b", quorum)
    return rig, answered


@pytest.mark.parametrize("position", [6, 7])
def test_a_step_goes_on_where_nobody_is_further(position: int) -> None:
    rig, answered = moved_beside(position)
    assert answered == ["Entered", "Offer", "Configure"]
    assert [rig[name].attempt.meets_at for name in "ab"] == [0, 7], "b opens its next step at a's batch"
    assert rig["b"].attempt.position == 7


def test_a_step_does_not_go_on_where_somebody_is_further() -> None:
    rig, answered = moved_beside(8)
    assert answered == ["Entered", "Abort", "TellGroup"]
    assert (rig["a"].phase, str(rig["a"].error)) == (Phase.BROKEN, ELSEWHERE)
    assert rig["b"].attempt.meets_at == 8
    assert moved_beside(8, r19_positions=False)[1] == ["Entered", "Offer", "Configure"]


def test_who_says_nothing_goes_on_anywhere() -> None:
    rig = computing(position=0)
    asks = [dies(rig, seen_by="a")["a"], asks_at(rig, "b", 8)]
    assert kinds(rig.answer("a", rig.quorum(asks))) == ["Entered", "Offer", "Configure"]


def test_who_heals_goes_to_where_those_are_that_hold_the_state() -> None:
    """Also back: it has been through batches whose steps were nobody's."""
    rig = computing(position=7)
    rig.handle("c", on.StateTorn())
    asks = [asks_at(rig, name, position) for name, position in (("a", 7), ("b", 6), ("c", 9))]
    quorum = rig.quorum(asks)
    for name in "abc":
        rig.answer(name, quorum)
    assert [rig[name].attempt.meets_at for name in "abc"] == [7, 7, 7]


@pytest.mark.parametrize("behind", [True, False])
def test_who_never_got_to_the_others_batch_asks_again_with_its_own(behind: bool) -> None:
    """Its quorum ended before it stood: whoever was further is gone, and so may be the state that belongs to there."""
    rig = computing(position=7)
    if behind:
        rig.fail("c")
        rig["c"].held.version = Version(0, 0)
    asks = [asks_at(rig, name, position) for name, position in (("a", 9), ("b", 9), ("c", 7))]
    quorum = rig.quorum(asks)
    assert "Configure" in kinds(rig["c"].handle(on.QuorumAnswered(rig["c"].asks, quorum), rig.now))
    assert rig["c"].attempt.meets_at == 9
    rig.handle("c", on.MemberLost(quorum.quorum_id, ("a", "b")))
    rig.now += ASK_AGAIN_S
    (sent,) = rig.handle("c", on.Tick())
    assert isinstance(sent, do.SendAsk)
    assert sent.ask.position == 7


def test_who_may_not_heal_stays_where_it_is() -> None:
    rig = computing(position=7)
    rig.handle("c", on.StateTorn())
    quorum = rig.quorum([asks_at(rig, name, position, allow_heal=False) for name, position in (("a", 7), ("c", 9))])
    rig.answer("c", quorum)
    assert (rig["c"].attempt.meets_at, rig["c"].attempt.position) == (0, 9)


def test_a_lighthouse_of_an_older_version_is_refused() -> None:
    """It forgets the positions that come with asks: members would train on different batches."""
    rig = computing(position=7)
    asks = [replace(asks_at(rig, name, 7), position=0) for name in "ab"]
    assert rig.answer("a", rig.quorum(asks)) == ()
    assert isinstance(rig["a"].failure, ConfigError)
    assert "the lighthouse, or group rank 0, runs an older version of ft_core" in str(rig["a"].failure)


# ---------------------------------------------------------------- a rank of several


def moving_rank() -> Rig:
    """Rank 0 of a group of two has learnt that c is gone, and asks at once."""
    rig = computing(trained(timeout_s=TIMEOUT_S, group_world_size=2))
    actions = rig.handle("a", on.MemberLost(rig["a"].quorum_id, ("c",)))
    assert kinds(actions) == ["Abort", "SendAsk"], "its ask tells the group, and that the attempt may go on"
    assert isinstance(actions[1], do.SendAsk)
    assert (actions[1].ask.moves, actions[1].ask.failed) == (True, True)
    return rig


def test_a_rank_whose_group_goes_on_enters_the_next_quorum_with_its_attempt() -> None:
    rig = moving_rank()
    rank = rig["a"]
    assert rig.handle("a", on.MemberLost(rank.quorum_id, (rank.settings.replica_id,), moves=True)) == ()
    assert rig.handle("a", on.MemberLost(rank.quorum_id, ("b",))) == (), "it has left that quorum"
    sent = rank.formation.sent if rank.formation else None
    assert sent is not None
    assert kinds(rig.answer("a", rig.quorum([replace(sent, seq=2), member_ask("b", sent)]))) == [
        "Entered", "Offer", "Configure",
    ]  # fmt: skip
    assert (rank.phase, rank.error) == (Phase.OPEN, None)


def member_ask(name: str, like: Ask) -> Ask:
    return replace(like, replica_id=name)


def test_it_loses_the_attempt_if_another_rank_of_its_group_cannot_go_on() -> None:
    rig = moving_rank()
    rank, quorum_id = rig["a"], rig["a"].quorum_id
    told = rig.handle("a", on.MemberLost(quorum_id, (rank.settings.replica_id,)))
    assert told == (do.TellGroup(quorum_id, "another rank of this group could not go on with this step"),)
    assert (rank.phase, rank.forming, rank.failure) == (Phase.BROKEN, False, None)
    assert rank.own_vote().outcome is Outcome.BROKEN
    assert rank.boundary() == MustAsk("lost c", failed=True)


def test_what_another_rank_says_of_an_older_quorum_changes_nothing() -> None:
    rig = moving_rank()
    assert rig.handle("a", on.MemberLost(rig["a"].quorum_id - 1, (rig["a"].settings.replica_id,))) == ()
    assert rig["a"].phase is Phase.ASKING


def test_a_rank_that_learns_it_from_its_leader_goes_on_or_says_that_it_cannot() -> None:
    rig = computing(trained(timeout_s=TIMEOUT_S, group_world_size=2))
    mine = (rig["a"].settings.replica_id,)
    assert kinds(rig.handle("a", on.MemberLost(rig["a"].quorum_id, mine, moves=True))) == ["Abort", "SendAsk"]
    assert rig["b"].may_launch(OPENED)
    other = (rig["b"].settings.replica_id,)
    assert kinds(rig.handle("b", on.MemberLost(rig["b"].quorum_id, other, moves=True))) == ["Abort", "TellGroup"]
    assert kinds(rig.handle("c", on.MemberLost(rig["c"].quorum_id, (rig["c"].settings.replica_id,)))) == [
        "Abort", "TellGroup",
    ], "the group loses the attempt"  # fmt: skip


def test_a_rank_that_gives_up_going_on_tells_its_group() -> None:
    rig = moving_rank()
    assert kinds(rig.handle("a", on.StateWanted())) == ["TellGroup"]
    rig = moving_rank()
    rig.now += QUORUM_S + 1
    assert kinds(rig.handle("a", on.Tick())) == ["TellGroup"]
    rig = moving_rank()
    assert kinds(rig.handle("a", on.ShutDown())) == ["TellGroup"]


def test_a_rank_whose_next_quorum_does_not_stand_asks_again_and_loses_the_attempt_if_another_has_launched() -> None:
    rig = moving_rank()
    rank = rig["a"]
    sent = rank.formation.sent if rank.formation else None
    assert sent is not None
    quorum = rig.quorum([sent, member_ask("b", sent)])
    rank.handle(on.QuorumAnswered(rank.asks, quorum), rig.now)
    failed = rig.handle("a", on.GroupsFailed(quorum.quorum_id, "no connection", here=True))
    assert kinds(failed) == ["Abort", "Report"], "its next ask tells the others"
    rig.now += ASK_AGAIN_S
    again = only(rig.handle("a", on.Tick()), do.SendAsk).ask
    assert (again.moves, again.quorum_id) == (True, quorum.quorum_id)
    told = rig.handle("a", on.MemberLost(quorum.quorum_id, (rank.settings.replica_id,)))
    assert kinds(told) == ["TellGroup"]
    assert (rank.phase, rank.forming) == (Phase.BROKEN, False)


def test_also_between_two_steps() -> None:
    """Else its script would wait there, and the other's in a collective of the group's next step."""
    rig = trained("ab", timeout_s=TIMEOUT_S, group_world_size=2)
    rank = rig["a"]
    assert rank.may_launch(rig.now)
    rig.handle("a", on.CollectiveFailed(CollectiveError("b died")))
    rig.handle("a", on.QuorumWanted(wish()))
    sent = rank.formation.sent if rank.formation else None
    assert sent is not None
    assert not sent.moves
    quorum = rig.quorum([sent, member_ask("b", sent)])
    rank.handle(on.QuorumAnswered(rank.asks, quorum), rig.now)
    rig.handle("a", on.GroupsFailed(quorum.quorum_id, "no connection", here=True))
    rig.now += ASK_AGAIN_S
    assert only(rig.handle("a", on.Tick()), do.SendAsk).ask.moves
    assert kinds(rig.handle("a", on.MemberLost(quorum.quorum_id, (rank.settings.replica_id,)))) == ["TellGroup"]
    assert (rank.phase, rank.forming, rank.failure) == (Phase.BROKEN, False, None), (
        "its script goes on, to the next step"
    )


def test_only_deaths_move() -> None:
    """Whoever said goodbye left at a boundary, and who was superseded has no quorum to go on in."""
    held = Version(0, 0)
    for event in (on.MemberLost(0, ("c",), held), on.Superseded(0), on.CollectiveFailed(CollectiveError("x"))):
        rig = computing()
        if not isinstance(event, on.CollectiveFailed):
            event = replace(event, quorum_id=rig["a"].quorum_id)
        assert kinds(rig.handle("a", event))[:2] == ["Abort", "TellGroup"]
        assert rig["a"].phase is Phase.BROKEN


def test_who_waits_for_a_lease_or_for_state_does_not_move() -> None:
    rig = trained("abc", autonomy_s=10.0, orphan_s=1000.0, timeout_s=TIMEOUT_S)
    rig.now = OPENED
    rig.attempt()
    assert rig["a"].attempt.awaits_lease
    computing(rig)
    assert kinds(rig.handle("a", on.PeerEnded(rig["a"].quorum_id))) == ["Abort", "TellGroup"]
    rig = trained("ab", timeout_s=TIMEOUT_S)
    rig.fail()
    rig.ranks["c"] = new_rank("c", timeout_s=TIMEOUT_S)
    rig.form(heal=False)
    rig.handle("a", on.SoftError(ValueError("NaN")))
    rig.attempt()
    rig.now = OPENED
    rig["c"].opened(OPENED, pinned=False)
    assert rig["c"].receiving
    assert kinds(rig.handle("c", on.PeerEnded(rig["c"].quorum_id))) == ["Abort", "TellGroup"]


def test_between_two_steps_nothing_moves() -> None:
    """After should_commit the next boundary asks; whoever learns of a death before has no attempt open."""
    rig = computing()
    rig.attempt()
    assert kinds(rig.handle("a", on.PeerEnded(rig["a"].quorum_id))) == ["Abort", "TellGroup"]
    rig = computing()
    rig.all(on.ChangePending(rig["a"].quorum_id, "d wants to join"))
    rig.attempt()
    rig["a"].opened(OPENED, pinned=False)
    assert rig.handle("a", on.PeerEnded(rig["a"].quorum_id)) == ()


# ---------------------------------------------------------------- where it cannot go on


def test_an_attempt_is_lost_where_a_newcomer_needs_state() -> None:
    rig = computing()
    asks = dies(rig)
    rig.ranks["d"] = new_rank("d", lineage=9)
    quorum = rig.quorum([*asks.values(), rig.ask("d")])
    for name in "ab":
        entered, *rest = rig.answer(name, quorum)
        assert kinds([entered]) == ["Entered"]
        assert rest == [do.Abort(quorum.quorum_id), do.TellGroup(quorum.quorum_id, NEWCOMER)]
        assert (rig[name].phase, rig[name].forming, str(rig[name].error)) == (Phase.BROKEN, False, NEWCOMER)
    vote = rig["a"].own_vote()
    assert vote.reason == NEWCOMER
    assert rig["a"].settle(vote) == Settled(commit=False, actions=(do.Abort(quorum.quorum_id),))
    newcomer = rig["d"]
    newcomer.handle(on.QuorumAnswered(newcomer.asks, quorum), rig.now)
    newcomer.handle(on.MemberLost(quorum.quorum_id, ("a", "b")), rig.now)
    rig.now += ASK_AGAIN_S
    again = [rig.ask("a"), rig.ask("b"), only(rig.handle("d", on.Tick()), do.SendAsk).ask]
    quorum = rig.quorum(again)
    for name in "abd":
        rig.answer(name, quorum)
    assert rig.attempt("abd") == {"a": True, "b": True, "d": True}


def test_an_attempt_is_lost_where_this_replica_does_not_count() -> None:
    rig = computing()
    ask = dies(rig, seen_by="a")["a"]
    newer = member("b", 5, 5, allow_heal=False)
    quorum = replace(rig.quorum([ask]), members=(*rig.quorum([ask]).members, newer))
    reason = "this replica is not counted on in this quorum"
    assert kinds(rig.answer("a", quorum)) == ["Entered", "Abort", "TellGroup"]
    assert rig["a"].boundary() == MustAsk(reason, failed=True)


def test_an_attempt_is_given_up_where_a_newcomer_wants_live_state_before_it_asks() -> None:
    """Both would wait until quorum_timeout: the newcomer for the state, this rank for the newcomer."""
    rig = computing()
    asks = dies(rig)
    rank = rig["a"]
    assert rig.handle("a", on.StateWanted()) == ()
    assert (rank.phase, rank.forming, str(rank.error)) == (Phase.BROKEN, False, "lost c")
    assert rig.handle("a", on.StateWanted()) == ()
    assert rig.answer("a", rig.quorum(asks.values())) == (), "too late"
    assert not rank.may_launch(rig.now)
    rank.settle(rank.own_vote())
    assert rank.boundary() == MustAsk("lost c", failed=True)
    rig.ask("a")
    assert rig.handle("a", on.StateWanted()) == (do.OfferLive(),), "at a boundary it is given"


def test_an_attempt_moves_on_until_its_groups_stand() -> None:
    rig = computing()
    asks = dies(rig)
    first = rig.quorum(asks.values())
    rank = rig["a"]
    rank.handle(on.QuorumAnswered(rank.asks, first), rig.now)
    assert kinds(rank.handle(on.GroupsFailed(first.quorum_id, "b died", here=False), rig.now)) == [
        "Abort", "TellGroup", "Report",
    ]  # fmt: skip
    rig.now += ASK_AGAIN_S
    ask = only(rig.handle("a", on.Tick()), do.SendAsk).ask
    assert (ask.failed, ask.quorum_id) == (True, first.quorum_id)
    rig.answer("a", rig.quorum([ask]))
    assert rank.phase is Phase.OPEN
    assert rig.attempt("a") == {"a": True}


def test_an_attempt_that_finds_no_quorum_is_lost() -> None:
    rig = computing()
    dies(rig)
    rig["a"].handle(on.Tick(), rig.now + QUORUM_S)
    assert (rig["a"].phase, rig["a"].broken_reason) == (Phase.BROKEN, "lost c")
    assert str(rig["a"].failure).startswith("no quorum within")


def test_a_second_death_meanwhile() -> None:
    """The attempt that moved once is the first of its quorum: it is lost, and nothing else."""
    rig = computing()
    quorum = rig.quorum(dies(rig).values())
    for name in "ab":
        rig.answer(name, quorum)
    assert kinds(rig.handle("a", on.MemberLost(quorum.quorum_id, ("b",)))) == ["Abort", "TellGroup"]
    assert rig["a"].boundary() == MustAsk("lost b", failed=True)
