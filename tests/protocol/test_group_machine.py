"""The machine of a replica group: what its ranks do, it does as one. Every invariant is checked after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.errors import ConfigError, JobFinishedError, RefusedError
from ft_core.protocol.group import events as ev
from ft_core.protocol.group.group import LATE_S, Group
from ft_core.protocol.group.ranks import ANY_GROUP, Join
from ft_core.protocol.group.settings import GroupRules, GroupSettings
from ft_core.protocol.group.votes import MAX_BROKEN
from ft_core.protocol.lighthouse.replica_table import CLOSED_BEFORE
from ft_core.protocol.pushes import Busy, Change, Lost, Order, Reason, Refusal, Welcome
from ft_core.protocol.types import Ask, Outcome, Quorum, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

ME = "g:1"
GRACE_S, CONNECT_S, LIVENESS_S = 0.5, 10.0, 5.0
COMMIT, VETO, BROKEN = Outcome.COMMIT, Outcome.VETO, Outcome.BROKEN
GONE = Lost(7, (ME,))


class Driven:
    """A machine, its clock, and what it said last."""

    def __init__(self, size: int = 2, *, up: bool = True, **more: Any) -> None:
        self.group = Group(GroupSettings(ME, size, LIVENESS_S, GRACE_S, CONNECT_S, **more))
        self.now = 100.0
        self.size = size
        if up:
            for rank in range(size):
                self.do(ev.RankJoined(rank, 11 + rank))
            self.do(ev.Started(4711), ev.Welcomed())

    def do(self, *events: ev.Event, after: float = 0.0) -> list[ev.Effect]:
        self.now += after
        out: list[ev.Effect] = []
        for event in events:
            out += self.group.handle(event, self.now)
            self.group.validate()
        return out

    def ask(self, *ranks: int, seq: int = 1, **more: Any) -> list[ev.Effect]:
        return self.do(*(ev.RankAsked(rank, Ask(ME, seq, group_world_size=self.size, **more)) for rank in ranks))

    def form(self, quorum_id: int = 7, seq: int = 1) -> list[ev.Effect]:
        """All ask, and the lighthouse answers."""
        asked = next(e for e in self.ask(*range(self.size), seq=seq) if isinstance(e, ev.AskLighthouse))
        return self.do(ev.Answered(asked.ask.seq, Quorum(quorum_id, ())))

    def vote(self, rank: int, outcome: Outcome = COMMIT, attempt: int = 0, quorum_id: int = 7) -> list[ev.Effect]:
        return self.do(ev.RankVoted(rank, Verdict(quorum_id, attempt, outcome, outcome.value)))


def told(effects: Sequence[ev.Effect], rank: int) -> list[object]:
    """What one rank is told, in order."""
    out: list[object] = []
    for effect in effects:
        match effect:
            case ev.Tell(to, push) if to == rank:
                out.append(push)
            case ev.TellAll(push):
                out.append(push)
            case ev.Decide(to, verdict) if rank in to:
                out.append(verdict.outcome)
            case _:
                pass
    return out


def test_the_group_asks_once_all_have_and_all_get_the_answer() -> None:
    group = Driven()
    assert group.ask(0) == []
    (asked,) = group.ask(1)
    assert isinstance(asked, ev.AskLighthouse)
    assert group.ask(0, 1) == [], "presented again: it is open already"
    quorum = Quorum(7, ())
    assert group.do(ev.Answered(asked.ask.seq, quorum)) == [ev.Announce(quorum, ((0, 1), (1, 1)))]
    assert group.do(ev.Answered(asked.ask.seq, quorum)) == [], "an answer counts once"
    assert group.ask(1) == [ev.Announce(quorum, ((1, 1),))], "whoever missed it asks again"


def test_a_rank_need_not_know_the_name_and_the_size_of_its_group() -> None:
    group = Driven(1)
    (asked,) = group.do(ev.RankAsked(0, Ask(ANY_GROUP, 1), "red"))
    assert isinstance(asked, ev.AskLighthouse)
    assert (asked.ask.replica_id, asked.ask.group_world_size, asked.room) == (ME, 1, "red")


def test_ranks_that_have_asked_are_told_who_has_not_and_whether_it_is_paused() -> None:
    group = Driven(3)
    group.ask(0, 2)
    assert group.group.next_at == group.now + LATE_S
    late = group.do(ev.Tick(), after=LATE_S)
    assert told(late, 0) == told(late, 2) == [Reason("waiting for group rank 1 of g:1 to ask")]
    paused = group.do(ev.RankProgress(1, "saving", 60.0))
    assert paused[0] == ev.RenewLease("saving", 60.0)
    why = Reason("waiting for group rank 1 of g:1 to ask (paused, for at most 60 s more)", 60.0)
    assert told(paused, 0) == [Busy(0, ME, 60.0), why]
    assert told(paused, 1) == [Busy(0, ME, 60.0)]
    assert group.do(ev.RankProgress(1, "saving", 60.0)) == [], "no news"
    group.ask(1)
    assert group.group.late == ""


def test_a_pause_that_is_open_is_told_to_the_new_quorum() -> None:
    group = Driven()
    group.do(ev.RankProgress(1, "saving", 60.0))
    assert ev.TellAll(Busy(7, ME, 60.0)) in group.form()


def test_settings_that_differ_refuse_the_group() -> None:
    group = Driven()
    (refused,) = group.do(ev.RankAsked(0, Ask(ME, 1)), ev.RankAsked(1, Ask(ME, 1, min_replicas=2)))
    assert isinstance(refused, ev.Refuse)
    assert isinstance(group.group.fatal, ConfigError)
    assert group.do(ev.RefusedByLighthouse(RefusedError("again"))) == [], "the first word stands"


# ---------------------------------------------------------------- votes


def test_a_verdict_is_told_once_to_all_and_again_to_who_asks_again() -> None:
    group = Driven()
    group.form()
    assert group.vote(0) == []
    (decided,) = group.vote(1)
    assert decided == ev.Decide((0, 1), Verdict(7, 0, COMMIT, "commit"))
    assert group.vote(0, VETO) == [ev.Decide((0,), decided.verdict)]


def test_a_verdict_outlives_the_break_of_its_quorum() -> None:
    group = Driven()
    group.form()
    group.vote(0), group.vote(1)
    broke = group.do(ev.RankBroke(0, 7, "its ring broke"))
    assert told(broke, 1) == [GONE]
    assert told(group.vote(1), 1) == [COMMIT]
    assert told(group.vote(1, attempt=1), 1) == [BROKEN]
    assert group.do(ev.RankBroke(1, 7, "so it was told")) == [], "a break is told once"


def test_who_waits_in_a_quorum_that_breaks_is_told_why() -> None:
    group = Driven(3)
    group.form()
    group.vote(0), group.vote(1)
    (decided,) = [e for e in group.do(ev.RankBroke(2, 7, "its ring broke")) if isinstance(e, ev.Decide)]
    assert decided == ev.Decide((0, 1), Verdict(7, 0, BROKEN, "its ring broke"))
    assert told(group.vote(2), 2) == [BROKEN], "a late vote changes nothing"


def test_a_vote_may_be_taken_back_until_the_last_has_come() -> None:
    group = Driven()
    group.form()
    group.vote(0)
    assert told(group.vote(0, BROKEN), 0) == [BROKEN]
    assert told(group.vote(1), 1) == [BROKEN]
    again = Driven()
    again.form()
    again.vote(0), again.vote(1)
    assert told(again.vote(0, BROKEN), 0) == [COMMIT], "too late: the other rank applies it"


def test_an_ask_after_a_failure_breaks_the_others() -> None:
    group = Driven(3)
    group.form()
    failed = group.ask(1, seq=2, quorum_id=7, failed=True, reason="its ring broke")
    assert (told(failed, 0), told(failed, 1), told(failed, 2)) == ([GONE], [], [GONE])


# ---------------------------------------------------------------- an attempt that goes on (R19)

GO_ON = Lost(7, (ME,), moves=True)
MOVES: dict[str, Any] = {"seq": 2, "quorum_id": 7, "failed": True, "reason": "b died", "moves": True}


def test_a_group_asks_once_all_of_its_ranks_go_on() -> None:
    group = Driven(3)
    group.form()
    first = group.ask(1, **MOVES)
    assert (told(first, 0), told(first, 1), told(first, 2)) == ([GO_ON], [], [GO_ON])
    assert group.ask(0, **MOVES) == []
    (asked,) = group.ask(2, **MOVES)
    assert isinstance(asked, ev.AskLighthouse)
    assert (asked.ask.failed, asked.ask.moves) == (True, False), "that is nobody's business but the group's"
    assert group.ask(1, **MOVES) == [], "presented again"
    assert group.do(ev.Answered(asked.ask.seq, Quorum(8, ()))) == [ev.Announce(Quorum(8, ()), ((1, 2), (0, 2), (2, 2)))]


@pytest.mark.parametrize("asked", [(1,), (1, 2), (0, 1, 2)], ids=str)
def test_no_rank_goes_on_if_one_cannot(asked: tuple[int, ...]) -> None:
    group = Driven(3)
    group.form()
    group.ask(*asked, **MOVES)
    broke = group.do(ev.RankBroke(0, 7, "its ring broke"))
    assert told(broke, 1) == [GONE]
    assert told(broke, 2) == [GONE]
    void = [e for e in broke if isinstance(e, ev.ReportIncomplete)]
    assert bool(void) == (len(asked) == 3), "their ask was open at the lighthouse, and is void"
    assert told(group.ask(2, **{**MOVES, "seq": 3}), 2) == [GONE], "too late"
    again = group.ask(0, 1, 2, seq=4, quorum_id=7, failed=True)
    (asked_again,) = [e for e in again if isinstance(e, ev.AskLighthouse)]
    formed = group.do(ev.Answered(asked_again.ask.seq, Quorum(8, ())))
    assert ev.Announce(Quorum(8, ()), ((0, 4), (1, 4), (2, 4))) in formed


def test_a_rank_that_has_voted_cannot_go_on() -> None:
    group = Driven()
    group.form()
    group.vote(0)
    late = group.ask(1, **MOVES)
    assert (told(late, 0), told(late, 1)) == ([BROKEN, GONE], [GONE])
    group = Driven()
    group.form()
    group.ask(0, **MOVES)
    voted = group.vote(1)
    assert (told(voted, 0), told(voted, 1)) == ([GONE], [GONE, BROKEN])


def test_nor_one_that_asks_for_the_next_step() -> None:
    group = Driven()
    group.form()
    group.ask(0, seq=2, quorum_id=7)
    assert told(group.ask(1, **MOVES), 1) == [GONE]
    group = Driven()
    group.form()
    group.ask(0, **MOVES)
    assert told(group.ask(1, seq=2, quorum_id=7), 0) == [GONE]


def test_ranks_that_want_to_go_on_wait_for_the_others_for_a_bounded_time() -> None:
    group = Driven(3)
    group.form()
    group.ask(0, 2, **MOVES)
    out = group.do(ev.Tick(), after=LATE_S)
    assert (told(out, 0), told(out, 1), told(out, 2)) == ([GONE], [GONE], [GONE])


def test_a_group_that_lacks_a_rank_does_not_go_on() -> None:
    group = Driven()
    group.form()
    group.ask(0, **MOVES)
    out = group.do(ev.RankGone(1, silence_s=10.0))
    assert told(out, 0) == [GONE]
    assert [e.quorum_id for e in out if isinstance(e, ev.ReportIncomplete)] == [7]


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(("share", "waits"), [(0.5, True), (CLOSED_BEFORE - 0.01, True), (CLOSED_BEFORE, False)])
def test_a_rank_that_was_silent_for_long_is_given_no_time_to_come_back(share: float, waits: bool) -> None:
    group = Driven()
    group.form()
    out = group.do(ev.RankGone(1, silence_s=share * LIVENESS_S))
    assert [e.quorum_id for e in out if isinstance(e, ev.ReportIncomplete)] == ([] if waits else [7])


def test_a_stream_that_is_back_within_the_grace_costs_nothing() -> None:
    group = Driven()
    group.form()
    assert group.do(ev.RankGone(1, silence_s=0.0)) == []
    assert group.group.next_at == group.now + GRACE_S
    assert told(group.do(ev.RankJoined(1, 12), after=GRACE_S / 2), 1) == [Welcome(LIVENESS_S)]
    assert group.group.next_at is None


@pytest.mark.parametrize("first", ["the stream ends", "another group leaves"])
def test_there_is_no_grace_in_a_quorum_that_has_broken_for_another_group(first: str) -> None:
    group = Driven(3)
    group.form()
    events = ev.RankGone(2, silence_s=0.0), ev.Pushed(Lost(7, ("h:1",), failed=True))
    before, after = events if first == "the stream ends" else events[::-1]
    assert not [e for e in group.do(before) if isinstance(e, ev.ReportIncomplete)]
    assert [e.quorum_id for e in group.do(after) if isinstance(e, ev.ReportIncomplete)] == [7]


@pytest.mark.parametrize("said", [Lost(7, ("h:1",)), Lost(6, ("h:1",), failed=True)])
def test_a_group_that_leaves_a_quorum_unbroken_accuses_nobody(said: Lost) -> None:
    group = Driven()
    group.form()
    assert group.do(ev.RankGone(1, silence_s=0.0), ev.Pushed(said)) == [ev.TellAll(said)]
    assert group.group.next_at == group.now + GRACE_S


def test_there_is_no_grace_in_a_quorum_that_has_broken_for_the_group() -> None:
    group = Driven(3)
    group.form()
    group.do(ev.RankGone(2, silence_s=0.0))
    broke = group.do(ev.RankBroke(0, 7, "its ring broke"))
    assert [e.quorum_id for e in broke if isinstance(e, ev.ReportIncomplete)] == [7]
    off = Driven(3, rules=GroupRules(r12_accused=False))
    off.form()
    off.do(ev.RankGone(2, silence_s=0.0), ev.RankBroke(0, 7, "its ring broke"))
    assert off.group.next_at == off.now + GRACE_S


def test_a_rank_that_does_not_come_back_is_reported_and_asked_for() -> None:
    group = Driven(3)
    group.form()
    group.vote(0)
    group.do(ev.RankGone(2, silence_s=0.0))
    out = group.do(ev.Tick(), after=GRACE_S)
    assert told(out, 0) == [BROKEN, GONE]
    assert [e.quorum_id for e in out if isinstance(e, ev.ReportIncomplete)] == [7]
    group.ask(0, 1, seq=2, quorum_id=7)
    assert "(not connected: 2)" in str(group.do(ev.Tick(), after=LATE_S))
    group.do(ev.RankJoined(2, 13))
    (asked,) = group.ask(2, seq=2, quorum_id=7)
    assert isinstance(asked, ev.AskLighthouse)


def test_a_silent_rank_has_no_grace() -> None:
    group = Driven()
    group.form()
    assert any(isinstance(effect, ev.ReportIncomplete) for effect in group.do(ev.RankGone(1, silence_s=10.0)))


def test_an_ask_that_lost_a_rank_is_made_again_when_it_is_back() -> None:
    group = Driven()
    group.ask(0, 1)
    group.do(ev.RankGone(1, silence_s=10.0))
    (again,) = [e for e in group.do(ev.RankJoined(1, 12)) + group.ask(1) if isinstance(e, ev.AskLighthouse)]
    assert again.ask.seq == 2, "the answer to the first one is on its way, perhaps, and that quorum is over"
    assert group.do(ev.Answered(1, Quorum(6, ()))) == []
    assert group.do(ev.RankGone(1, silence_s=10.0))[-1] == ev.ReportIncomplete(0, str_of_loss(1))
    answered = group.do(ev.Answered(2, Quorum(7, ())))
    gone = ev.ReportIncomplete(7, "a rank of g:1 went while the quorum formed")
    assert answered == [gone], "rank 0 would be a step further in its script than the one that asks again"
    (once_more,) = [e for e in group.do(ev.RankJoined(1, 13)) + group.ask(1) if isinstance(e, ev.AskLighthouse)]
    formed = group.do(ev.Answered(once_more.ask.seq, Quorum(8, ())))
    assert formed == [ev.Announce(Quorum(8, ()), ((0, 1), (1, 1)))]


def test_news_of_links_makes_no_other_ask() -> None:
    group = Driven()
    group.ask(0, 1)
    (again,) = group.ask(1, unreachable=("h:1",))
    assert again == ev.AskLighthouse(Ask(ME, 1, group_world_size=2, unreachable=("h:1",)), None)
    assert group.ask(1, unreachable=("h:1",)) == [], "no news"
    quorum = Quorum(7, ())
    assert group.do(ev.Answered(1, quorum)) == [ev.Announce(quorum, ((0, 1), (1, 1)))], "it was on its way"


def test_news_of_links_that_cross_the_answer_ask_for_no_other_quorum() -> None:
    group = Driven()
    group.form()
    crossing = group.ask(1, reached=("h:1",))
    assert crossing == [ev.Announce(Quorum(7, ()), ((1, 1),))], "it has the answer, or gets it now"
    assert group.do(ev.Tick(), after=LATE_S) == [], "nobody is waited for"


def str_of_loss(rank: int) -> str:
    return f"group rank {rank} of g:1 is gone or frozen (its connection to group rank 0 ended)"


def test_who_leaves_breaks_nothing() -> None:
    group = Driven()
    group.form()
    assert group.do(ev.RankLeft(1), ev.Tick()) == []


def test_what_a_rank_missed_is_told_when_its_stream_is_open_again() -> None:
    group = Driven()
    group.form()
    group.vote(0), group.vote(1)
    group.do(ev.RankGone(1, silence_s=0.0), ev.RankBroke(0, 7, "its ring broke"), ev.Pushed(Busy(7, "h:1", 9.0)))
    back = told(group.do(ev.RankJoined(1, 12)), 1)
    verdict = Verdict(7, 0, COMMIT, "commit")
    assert back == [Welcome(LIVENESS_S), verdict, GONE, Busy(7, "h:1", 9.0)], "a verdict comes before the break"
    group.ask(0, 1, seq=2)
    group.do(ev.RankGone(1, silence_s=0.0), ev.Pushed(Reason("waiting for h:1", 9.0)), ev.DrainOrdered("SIGTERM"))
    back = told(group.do(ev.RankJoined(1, 12)), 1)
    assert back[-2:] == [Order(kill=False, reason="SIGTERM"), Reason("waiting for h:1", 9.0)]


def test_no_rank_has_joined_before_the_lighthouse_has_welcomed_the_group() -> None:
    group = Driven(up=False)
    assert group.do(ev.RankJoined(0, 11), ev.RankJoined(1, 12)) == []
    assert told(group.do(ev.Welcomed()), 1) == [Welcome(LIVENESS_S)]
    assert group.do(ev.Welcomed()) == [], "a lease that opens again concerns no rank"


def test_ranks_that_never_come_are_named_and_a_latecomer_learns_it() -> None:
    group = Driven(3, up=False)
    group.do(ev.RankJoined(0, 11), ev.Started(4711), ev.Welcomed())
    (refused,) = group.do(ev.Tick(), after=CONNECT_S)
    assert isinstance(refused, ev.Refuse)
    assert "group ranks 1, 2 of g:1 never connected to group rank 0 (port 4711)" in str(refused.error)
    assert not group.group.untold, "they were waited for"
    assert told(group.do(ev.RankJoined(1, 12)), 1) == [Refusal(refused.error)]


def test_who_has_yet_to_hear_that_the_group_is_refused() -> None:
    """A rank that has not come, and one whose stream is away; not one that is lost."""
    group = Driven(4, up=False)
    group.do(*(ev.RankJoined(rank, 11 + rank) for rank in range(3)), ev.Started(4711), ev.Welcomed())
    group.do(ev.RankGone(1, silence_s=10.0))
    group.do(ev.RankGone(2, silence_s=0.0))
    assert not group.group.untold, "nothing is refused"
    error = JobFinishedError("done")
    assert group.do(ev.RefusedByLighthouse(error)) == [ev.Refuse(error)]
    assert [*group.group.untold] == [2, 3]
    for rank, left in ((3, [2]), (2, [])):
        assert told(group.do(ev.RankJoined(rank, 11 + rank)), rank) == [Refusal(error)]
        assert [*group.group.untold] == left


def test_who_is_no_rank_of_the_group() -> None:
    group = Driven()
    assert group.group.refusal(Join(ME, 1, 2, 12)) is None, "a newer stream of the same process"
    assert group.group.refusal(Join(ANY_GROUP, 1, 1, 12)) is None
    for join, words in (
        (Join("x:1", 1, 2, 12), "not of x:1"),
        (Join(ME, 1, 4, 12), "world_size=4"),
        (Join(ME, 2, 2, 12), "not one of ranks"),
        (Join(ME, 1, 2, 99), "two processes"),
        (Join(ME, 0, 2, 99), "two processes"),
    ):
        assert words in str(group.group.refusal(join))


# ---------------------------------------------------------------- the lighthouse


def test_pushes_go_to_every_rank() -> None:
    group = Driven()
    change = Change(7, "somebody wants to join")
    assert group.do(ev.Pushed(change)) == [ev.TellAll(change)]
    error = JobFinishedError("done")
    assert group.do(ev.RefusedByLighthouse(error)) == [ev.Refuse(error)]
    assert group.do(ev.RankGone(1, silence_s=10.0)) == [], "it is over"


def test_a_verdict_of_the_quorum_in_force_is_told_again_before_that_breaks() -> None:
    group = Driven()
    group.form()
    group.do(ev.RankGone(1, silence_s=0.0))
    group.vote(1)
    group.vote(0)  # the verdict is on its way to a stream that is gone
    again = group.do(ev.RankJoined(1, 12))
    assert [effect.push.outcome for effect in again if isinstance(effect.push, Verdict)] == [COMMIT]  # type: ignore[union-attr]
    broken = group.do(ev.RankBroke(0, 7, "a peer has ended its connection"))
    assert told(broken, 1) == [GONE], "which comes after it"


def test_a_group_that_drains_waits_for_no_late_rank() -> None:
    group = Driven(3, drains=True)
    group.ask(0, 2)
    group.do(ev.Tick(), after=LATE_S)
    assert group.group.late
    group.do(ev.DrainOrdered("SIGTERM"))
    group.ask(1)
    assert not group.group.late


def test_a_group_that_drains_asks_no_more() -> None:
    group = Driven(drains=True)
    group.ask(0, 1)
    order = Order(kill=False, reason="SIGTERM")
    assert group.do(ev.DrainOrdered("SIGTERM")) == [ev.TellAll(order)]
    assert group.do(ev.Answered(1, Quorum(7, ()))) == [], "nobody enters it"
    assert group.ask(1, seq=2) == [ev.Tell(1, order)]


# ---------------------------------------------------------------- anything, in any order

RANKS = st.integers(0, 2)
QUORUMS = st.integers(0, 1)
"""Times three attempts: fewer than are remembered."""
ASKS = st.builds(Ask, st.just(ME), st.integers(1, 3), quorum_id=QUORUMS, failed=st.booleans(), moves=st.booleans())
EVENTS = st.one_of(
    st.builds(ev.RankJoined, RANKS, st.just(5)),
    st.builds(ev.RankGone, RANKS, st.booleans()),
    st.builds(ev.RankLeft, RANKS),
    st.builds(ev.RankAsked, RANKS, ASKS),
    st.builds(ev.RankVoted, RANKS, st.builds(Verdict, QUORUMS, st.integers(0, 2), st.sampled_from(Outcome))),
    st.builds(ev.RankBroke, RANKS, QUORUMS, st.just("")),
    st.builds(ev.RankProgress, RANKS, st.just("saving"), st.sampled_from([0.0, 30.0])),
    st.builds(ev.Answered, st.integers(0, 4), st.builds(Quorum, QUORUMS, st.just(()))),
    st.builds(ev.Pushed, st.builds(Reason, st.just("because"))),
    st.builds(ev.Pushed, st.builds(Lost, QUORUMS, st.just(("h:1",)), failed=st.booleans())),
    st.builds(ev.DrainOrdered, st.just("SIGTERM")),
    st.just(ev.Welcomed()),
    st.just(ev.Tick()),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.1, 2.0])), max_size=60), st.booleans())
def test_invariants_hold_and_nobody_is_told_two_verdicts(events: list[tuple[ev.Event, float]], drains: bool) -> None:
    group = Driven(3, up=False, drains=drains)
    verdicts: dict[tuple[int, int], Outcome] = {}
    breaks: list[int] = []
    for event, after in [(ev.Started(1), 0.0), *events]:
        for effect in group.do(event, after=after):
            if isinstance(effect, ev.Decide):
                key = effect.verdict.quorum_id, effect.verdict.attempt
                assert verdicts.setdefault(key, effect.verdict.outcome) is effect.verdict.outcome
            elif isinstance(effect, ev.Note):
                breaks.append(int(effect.text.split("0x")[1].split(":")[0], 16))
    assert len(breaks) == len(set(breaks)) <= MAX_BROKEN
