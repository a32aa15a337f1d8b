"""The machine of a rank that is not its group's leader: what it concludes while the leader is away."""

from __future__ import annotations

import pytest

from ft_core.protocol.group.follower import Broken, Follower, FollowerSettings, Unreachable
from ft_core.protocol.group.settings import GroupRules
from ft_core.protocol.pushes import Answer, Lost, Order
from ft_core.protocol.types import Outcome, Quorum, Verdict

ME = "g:1"
GRACE_S, LIVENESS_S, CONNECT_S = 0.5, 5.0, 60.0
VOTE = Verdict(7, 3, Outcome.COMMIT, "")


def follower() -> Follower:
    """Rank 1, in quorum 7, with its stream open."""
    one = Follower(FollowerSettings(ME, 1, GRACE_S, LIVENESS_S, CONNECT_S))
    one.started(100.0)
    one.opened()
    one.asks(1, moves=False)
    assert one.took(Answer(1, Quorum(7, ())))
    return one


def test_nothing_follows_while_the_stream_is_open() -> None:
    one = follower()
    assert one.next_at is None
    assert one.due(1e9) is None


def test_a_leader_that_never_comes_is_given_up() -> None:
    one = Follower(FollowerSettings(ME, 1, GRACE_S, LIVENESS_S, CONNECT_S))
    one.started(100.0)
    assert one.next_at == 160.0
    assert (one.due(159.9), one.due(160.0), one.due(1e9)) == (None, Unreachable(CONNECT_S), None)


def test_past_the_grace_it_is_broken_then_has_to_end_then_gives_up() -> None:
    one = follower()
    one.ended(200.0, 0.0)
    assert one.due(200.4) is None
    broken = one.due(200.5)
    assert broken == Broken(7, "group rank 0 of g:1 is gone (the connection to it ended)")
    assert isinstance(broken, Broken)
    assert broken.told(ME) == Lost(7, (ME,))
    assert one.next_at == 205.5
    ends = one.due(205.5)
    assert isinstance(ends, Order)
    assert ends.kill
    assert ends.reason.startswith("group rank 0 of g:1 is gone or frozen, and rank 1 has not come to the next step")
    assert one.next_at == 260.5
    assert one.due(260.5) == Unreachable(CONNECT_S)
    assert one.next_at is None


def test_a_stream_that_is_open_again_ends_that() -> None:
    one = follower()
    one.ended(200.0, 0.0)
    one.opened()
    assert one.due(1e9) is None
    one.ended(300.0, 0.0)
    assert one.next_at == 300.0 + GRACE_S, "each absence has its own grace"


def test_who_has_asked_waits_for_a_quorum_and_not_inside_the_group() -> None:
    one = follower()
    one.ended(200.0, 0.0)
    assert isinstance(one.due(200.5), Broken)
    one.asks(2, moves=False)
    assert one.due(206.0) is None
    assert one.next_at == 260.5


def test_who_has_asked_in_the_middle_of_a_step_may_wait_inside_the_group() -> None:
    one = follower()
    one.asks(2, moves=True)
    one.ended(200.0, 0.0)
    assert isinstance(one.due(200.5), Broken)
    ends = one.due(205.5)
    assert isinstance(ends, Order)
    assert "has not come to the next step: it waits inside the group" in ends.reason
    one.asks(3, moves=False)
    one.ended(300.0, 0.0)
    assert [type(one.due(305.5)), one.due(305.5)] == [Broken, None]


def test_who_has_asked_has_to_end_if_the_leader_fell_silent() -> None:
    """A leader that waits for a quorum itself answers: this one is frozen or cut off, and there is none without it."""
    one = follower()
    one.ended(200.0, LIVENESS_S)
    assert isinstance(one.due(200.5), Broken)
    one.asks(2, moves=False)
    assert one.due(205.4) is None
    ends = one.due(205.5)
    assert isinstance(ends, Order)
    assert ends.kill
    assert ends.reason.startswith("group rank 0 of g:1 is frozen or cut off, and rank 1 has asked for the next quorum")
    assert one.next_at == 260.5


def test_a_leader_that_answers_again_ends_nothing() -> None:
    one = follower()
    one.ended(200.0, LIVENESS_S)
    assert isinstance(one.due(200.5), Broken)
    one.asks(2, moves=False)
    one.opened()
    assert one.due(1e9) is None
    one.ended(300.0, 0.0)
    assert [type(one.due(306.0)), one.due(306.0)] == [Broken, None], "each absence is judged by itself"


def test_without_the_rule_it_waits_for_connect_s() -> None:
    one = Follower(FollowerSettings(ME, 1, GRACE_S, LIVENESS_S, CONNECT_S, GroupRules(r12_silent=False)))
    one.asks(1, moves=False)
    one.ended(200.0, LIVENESS_S)
    assert [type(one.due(206.0)), one.due(206.0)] == [Broken, None]
    assert one.due(260.5) == Unreachable(CONNECT_S)


def test_who_looks_late_is_told_one_thing_after_the_other() -> None:
    one = follower()
    one.ended(200.0, 0.0)
    said = [type(one.due(1e9)) for _ in range(4)]
    assert said == [Broken, Order, Unreachable, type(None)]


@pytest.mark.parametrize(("quorum_id", "kept"), [(7, True), (8, False)])
def test_a_vote_is_open_in_the_newest_quorum_only(quorum_id: int, kept: bool) -> None:
    one = follower()
    one.votes(VOTE)
    one.asks(2, moves=False)
    assert one.took(Answer(2, Quorum(quorum_id, ())))
    assert one.vote == (VOTE if kept else None)
    assert one.quorum_id == quorum_id


def test_an_answer_to_nothing_that_is_open_is_none() -> None:
    one = follower()
    assert not one.took(Answer(1, Quorum(9, ())))
    one.asks(3, moves=False)
    assert not one.took(Answer(2, Quorum(9, ())))
    assert (one.quorum_id, one.asking) == (7, 3)


def test_only_its_own_verdict_answers_a_vote() -> None:
    one = follower()
    one.votes(VOTE)
    assert one.took(Verdict(7, 2, Outcome.COMMIT, ""))
    assert one.vote == VOTE
    assert one.took(Verdict(7, 3, Outcome.VETO, "another rank"))
    assert one.vote is None
