"""What always holds of a rank: each invariant can fail, each transition is reached, and no sequence breaks any."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_core.errors import CollectiveError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import TRANSITIONS, Cause, Heal, MustAsk, Phase
from ft_core.protocol.rank.settings import RankRules
from ft_core.protocol.types import VOID, Member, Outcome, Quorum, Verdict, Version
from tests.protocol.rig import QUORUM_S, CheckedRank, Rig, kinds, new_rank, trained, wish

# ---------------------------------------------------------------- each invariant can fail


def moved() -> CheckedRank:
    rig = trained()
    rig["a"].opened(0.0, pinned=False)
    rig.handle("a", on.PeerEnded(rig["a"].quorum_id))
    assert rig["a"].formation is not None
    return rig["a"]


def asking() -> CheckedRank:
    rig = Rig()
    rig.ask("a")
    return rig["a"]


def reducing() -> CheckedRank:
    rig = trained()
    rig.sums()
    return rig["a"]


def _set(path: str, value: object) -> Callable[[CheckedRank], None]:
    def change(rank: CheckedRank) -> None:
        *way, last = path.split(".")
        at: object = rank
        for name in way:
            at = getattr(at, name)
        setattr(at, last, value)

    return change


VIOLATIONS: list[tuple[Callable[[], CheckedRank], Callable[[CheckedRank], None], str]] = [
    (asking, _set("formation", None), "Phase.ASKING with formation None"),
    (moved, _set("phase", Phase.BROKEN), "Phase.BROKEN with formation Formation"),
    (lambda: trained()["a"], _set("phase", Phase.OUTSIDE), "outside, after a quorum"),
    (lambda: new_rank("a"), _set("phase", Phase.OPEN), "Phase.OPEN without a plan"),
    (lambda: trained()["a"], _set("phase", Phase.COUNTED), "Phase.COUNTED with verdict None"),
    (reducing, _set("attempt.verdict", Verdict(1, 1, Outcome.COMMIT)), "Phase.REDUCING with verdict"),
    (lambda: trained()["a"], _set("attempt.voted", True), "voted in Phase.OPEN"),
    (lambda: trained()["a"], _set("phase", Phase.BROKEN), "broken without a reason"),
    (reducing, _set("broken_reason", "b died"), "Phase.REDUCING, and broken: b died"),
    (reducing, _set("_lost_after_vote", "b died"), "lost after a vote that was not given"),
    (reducing, _set("_agreed_to_stay", True), "alone, and agreed with others"),
    (reducing, _set("attempt.heal", Heal.READY), "heal Heal.READY that was not planned"),
    (reducing, _set("held.version", Version(9, 9)), "holds step 9 after step 1"),
    (reducing, _set("highest_id", 1), "an id that is not the newest"),
    (reducing, _set("held.stable", Version(9, 9)), "step 9 stable at step 1"),
    (reducing, _set("attempt.pinned", False), "Phase.REDUCING, and may move"),
    (moved, _set("asks", 1), "ask 2 is open, 1 is the newest"),
]  # fmt: skip


@pytest.mark.parametrize(("rank", "change", "told"), VIOLATIONS, ids=[told for _, _, told in VIOLATIONS])
def test_each_invariant_can_fail(
    rank: Callable[[], CheckedRank], change: Callable[[CheckedRank], None], told: str
) -> None:
    broken = rank()
    broken.validate()
    change(broken)
    with pytest.raises(AssertionError, match=told):
        broken.validate()


# ---------------------------------------------------------------- each transition is reached, and no other


def _asks_again(rank: CheckedRank) -> None:
    rank.handle(on.QuorumAnswered(rank.asks, Quorum(9, (Member("a", Version(0, 0), 1),))), 0.0)
    rank.handle(on.GroupsFailed(9, "b died", here=False), 0.0)


def _times_out(rank: CheckedRank) -> None:
    rank.handle(on.Tick(), QUORUM_S)


def _changes(rank: CheckedRank) -> None:
    rank.handle(on.ChangePending(rank.quorum_id, "d wants to join"), 0.0)


def _fails(rank: CheckedRank) -> None:
    rank.handle(on.CollectiveFailed(CollectiveError("b died")), 0.0)


def _alone() -> CheckedRank:
    return trained("a")["a"]


def counted() -> CheckedRank:
    rank = _alone()
    assert rank.may_launch(0.0)
    rank.count(rank.ballot(0.0), 0.0)
    return rank


def _then(begin: Callable[[], CheckedRank], *steps: Callable[[CheckedRank], object]) -> Callable[[], CheckedRank]:
    def walk() -> CheckedRank:
        rank = begin()
        for step in steps:
            step(rank)
        return rank

    return walk


def _asks(rank: CheckedRank) -> None:
    assert kinds(rank.handle(on.QuorumWanted(wish()), 0.0))[-1] == "SendAsk"


def _settles(rank: CheckedRank) -> None:
    rank.settle(rank.own_vote())


WAYS: dict[tuple[Phase, Cause], Callable[[], CheckedRank]] = {
    (Phase.OUTSIDE, Cause.ASK): asking,
    (Phase.OPEN, Cause.ASK): _then(_alone, _changes, lambda r: r.may_launch(0.0), lambda r: r.count(r.ballot(0.0), 0.0),
                                   _settles, _asks),
    (Phase.BROKEN, Cause.ASK): _then(_alone, _fails, _asks),
    (Phase.ASKING, Cause.ANSWER): _then(asking, _asks_again),
    (Phase.ASKING, Cause.BREAK): _then(_alone, _fails, _asks, _times_out),
    (Phase.ASKING, Cause.NONE_FORMED): _then(asking, _times_out),
    (Phase.FORMING, Cause.BUILT): _alone,
    (Phase.FORMING, Cause.BREAK): _then(asking, _asks_again),
    (Phase.OPEN, Cause.LAUNCH): reducing,
    (Phase.OPEN, Cause.BREAK): _then(_alone, _fails),
    (Phase.REDUCING, Cause.COUNT): counted,
    (Phase.REDUCING, Cause.BREAK): _then(reducing, _fails),
    (Phase.COUNTED, Cause.LAUNCH): _then(counted, lambda r: r.may_launch(0.0)),
    (Phase.COUNTED, Cause.SETTLE): _then(counted, _settles),
    (Phase.COUNTED, Cause.BREAK): _then(counted, _fails),
}  # fmt: skip


def test_the_table_of_transitions_is_all_that_happens() -> None:
    assert set(WAYS) == set(TRANSITIONS)


@pytest.mark.parametrize("pair", list(TRANSITIONS), ids=str)
def test_each_transition_is_reached(pair: tuple[Phase, Cause]) -> None:
    went = WAYS[pair]().went
    assert pair in went
    ends = [TRANSITIONS[step] for step in went]
    assert [phase for phase, _ in went] == [Phase.OUTSIDE, *ends[:-1]], "nothing else moves a phase"


ELSE = [(phase, cause) for phase in Phase for cause in Cause if (phase, cause) not in TRANSITIONS]


@pytest.mark.parametrize(("phase", "cause"), ELSE)
def test_what_is_not_in_the_table_is_a_mistake_of_ours(phase: Phase, cause: Cause) -> None:
    rank = new_rank("a")
    rank.phase = phase
    with pytest.raises(KeyError):
        rank._to(cause)
    assert rank.phase is phase


# ---------------------------------------------------------------- no sequence breaks one

RULES = [RankRules(), *(replace(RankRules(), **{rule.name: False}) for rule in fields(RankRules))]
VERSIONS = [VOID, Version(0, 0), Version(1, 5), Version(3, 9 << 32)]
ERROR = CollectiveError("an error")


class Walk:
    """One rank to which anything happens, in any order; only what no shell can do is left out."""

    def __init__(self, rank: CheckedRank) -> None:
        self.rank = rank
        self.now = 0.0
        self.before = rank.held.version
        self.done: list[do.Action] = []

    def handle(self, event: on.Event) -> None:
        self.done += self.rank.handle(event, self.now)

    def quorum_id(self, n: int) -> int:
        """The quorum in force, the one before, or one that is not entered yet."""
        return max(0, (self.rank.quorum_id, self.rank.quorum_id - 1, self.rank.highest_id + 1, 77)[n % 4])

    @property
    def untouched_is_no_news(self) -> bool:
        """State is copied before a rank asks: no ask says that it is torn, and no quorum has gone on since."""
        formation, plan = self.rank.formation, self.rank.plan
        return (formation is None or formation.prefetching) and (plan is None or self.before <= self.rank.attempt.base)

    def step(self, n: int) -> None:
        """One of the calls that are no events."""
        rank, in_quorum = self.rank, self.rank.plan is not None
        match n % 12:
            case 0:
                rank.boundary()
            case 1:
                rank.boundary()
                rank.opened(self.now, pinned=n > 30)
            case 2:
                rank.pin()
            case 3:
                rank.weigh((None, 0, 5)[n % 3])
            case 4 | 5:
                rank.may_launch(self.now)
            case 6:
                rank.may_launch_user_op()
            case 7 | 8 if in_quorum and rank.plan is not None:
                sums = [x * rank.plan.size for x in rank.ballot(self.now)]
                self.done += rank.count(sums if n % 5 else [0.0] * len(sums), self.now).actions
            case 9:
                rank.own_vote()
            case 10:
                self.settle(n)
            case 11:
                rank.hands_over()

    def settle(self, n: int) -> None:
        """The group's answer to this rank's vote."""
        vote = self.rank.own_vote()
        changes = ({}, {"drain": True}, {"behind": True}, {"trails": True}, {"change": True}, {"stop": True})[n % 6]
        verdict = replace(vote, **changes)  # type: ignore[arg-type]
        if n % 7 == 0:
            verdict = replace(verdict, outcome=Outcome.BROKEN, reason="another rank")
        self.done += self.rank.settle(verdict).actions

    def answered(self, n: int) -> None:
        rank = self.rank
        sent = rank.formation.sent if rank.formation else None
        if sent is None:
            return
        others = [Member(name, VERSIONS[(n >> i) % 4], n % 3, allow_heal=n % 5 > 0) for i, name in enumerate("bc")]
        members = (Member.of(sent), *others[: n % 3])
        if max(m.version for m in members) != VOID:
            quorum = Quorum(max(rank.highest_id, VERSIONS[-1].quorum_id) + 1 + n % 2, members)
            self.handle(on.QuorumAnswered(rank.asks - (n % 11 == 0), quorum))

    def event(self, n: int) -> None:
        """What a shell reports of its own work: if there was any."""
        rank, quorum_id = self.rank, self.quorum_id(n)
        match n % 9:
            case 0:
                why = None if n % 2 else MustAsk("another room", failed=False)
                self.handle(on.QuorumWanted(wish(prefetch=n % 4 == 0, hands_over=n % 5 == 0, timeout_s=2.0), why))
            case 1 | 2:
                self.answered(n)
            case 3:
                self.handle(on.GroupsUp(quorum_id))
            case 4:
                self.handle(on.Tick())
            case 5:
                self.handle(on.StateReceived(quorum_id))
            case 6 if rank.attempt.heal is Heal.READY and not rank.forming:
                self.handle(on.StateApplied(None, n, n))
            case 7 if rank.held.version != VOID:
                self.before = rank.held.version
                self.handle(on.StateTorn())
            case 8 if rank.held.version == VOID and self.untouched_is_no_news:
                self.handle(on.StateUntouched(self.before))

    def push(self, n: int) -> None:
        """What may come at any time."""
        quorum_id, held = self.quorum_id(n), VERSIONS[n % 4]
        base = self.rank.attempt.base
        events: list[on.Event] = [
            on.PrefetchEnded(ERROR if n % 3 == 0 else None), on.GroupsFailed(quorum_id, "refused", here=n % 3 == 0),
            on.NoQuorumYet("waiting", float(n % 3)), on.LinksSeen(("b",) * (n % 2), ("c",) * (n % 3 > 0)),
            on.StateWanted(), on.MemberLost(quorum_id, ("b",), (VOID, held, base, Version(base.step + 1, 1))[n % 4]),
            on.MemberLost(quorum_id, ("b", "c")), on.PeerEnded(quorum_id), on.Superseded(quorum_id),
            on.ChangePending(quorum_id, "join"), on.CollectiveFailed(CollectiveError("")), on.SoftError(ERROR),
            on.LeaseReturned(), on.Paused(quorum_id, "b" * (n % 2), float(n % 3)),
            on.ReceiveFailed(quorum_id, ERROR, final=n % 5 == 0), on.DataEnded(n % 2 == 0, n % 3 == 0), on.DataBack(),
            on.StopWanted(), on.LeaveWanted(), on.DifferenceTolerated(),
            on.StatesDiffer(self.rank.attempt.verdict or self.rank.own_vote(), "differ", mine=n % 2 == 0),
        ]  # fmt: skip
        rare: list[on.Event] = [on.Refused(ERROR), on.DrainOrdered(""), on.ShutDown()]
        self.handle(rare[n % 3] if n > 195 else events[n % len(events)])

    def go(self, n: int) -> None:
        self.now += (0.0, 0.005, 0.5, 1.5)[n % 4]
        kind, n = n % 4, n // 4
        (self.step, self.event, self.event, self.push)[kind](n)
        waits = self.rank.formation is not None and self.rank.phase is Phase.ASKING
        prefetches = self.rank.formation is not None and self.rank.formation.prefetching
        assert math.isfinite(self.rank.next_at) is (waits and not prefetches), "a wait has a limit, nothing else has"

    def check(self) -> None:
        """What was done is in order."""
        built = [action.plan.quorum_id for action in self.done if isinstance(action, do.Configure)]
        assert built == sorted(set(built)), "R14: a quorum is configured at most once, and ids grow"
        asks = [action.ask for action in self.done if isinstance(action, do.SendAsk)]
        assert all(ask != before for before, ask in pairwise(asks)), "an ask is presented again with news only"
        alike = [replace(ask, unreachable=(), reached=()) for ask in asks]  # of its links, that is
        once = [ask for ask, _ in groupby(alike)]
        assert [ask.seq for ask in once] == list(range(1, len(once) + 1))
        assert all(action.plan.heals for action in self.done if isinstance(action, do.Receive))
        ended = [action.quorum_id for action in self.done if isinstance(action, do.Abort | do.TellGroup)]
        assert ended == sorted(ended), "bad news of one quorum never hits another (R15)"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 799), max_size=120), st.sampled_from([1, 2]), st.booleans(),
    st.sampled_from(RULES), st.booleans(),
)  # fmt: skip
def test_no_sequence_of_events_breaks_an_invariant(
    what: list[int], group_world_size: int, exits: bool, rules: RankRules, in_quorum: bool
) -> None:
    options: dict[str, Any] = {"group_world_size": group_world_size, "exits_on_drain": exits, "rules": rules}
    walk = Walk(trained("a", **options)["a"] if in_quorum else new_rank("a", **options))
    begun = walk.rank.asks
    for n in what:
        walk.go(n)
    if not begun:
        walk.check()
