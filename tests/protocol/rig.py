"""Several real `Rank`s in lockstep: the smallest cluster, without a lighthouse or a clock that moves by itself.

Each rank is driven as a shell does it: events in, actions performed. A rank checks its invariants after every call.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from ft_core.errors import CollectiveError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.formation import Wish
from ft_core.protocol.rank.heal_plan import Plan  # noqa: TC001 - tests read better without a type-checking block
from ft_core.protocol.rank.phases import Cause, Heal, Phase
from ft_core.protocol.rank.rank import Rank
from ft_core.protocol.rank.settings import RankSettings
from ft_core.protocol.types import Ask, Member, Outcome, Quorum, Verdict, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

A = TypeVar("A", bound=do.Action)
T = TypeVar("T")
QUORUM_S = 30.0


class CheckedRank(Rank):
    """A rank whose every call is followed by `validate`; remembers how its phase changed."""

    def __init__(self, settings: RankSettings, *, lineage: int, now: float) -> None:
        super().__init__(settings, lineage=lineage, now=now)
        self.went: list[tuple[Phase, Cause]] = []
        self.validate()

    def _to(self, cause: Cause) -> None:
        self.went.append((self.phase, cause))
        super()._to(cause)


def _checked(call: Callable[..., T]) -> Callable[..., T]:
    @wraps(call)
    def checked(self: CheckedRank, *args: Any, **named: Any) -> T:
        out = call(self, *args, **named)
        self.validate()
        return out

    return checked


for _name in dir(Rank):
    if not _name.startswith("_") and _name != "validate" and callable(getattr(Rank, _name)):
        setattr(CheckedRank, _name, _checked(getattr(Rank, _name)))


def member(name: str, step: int = 0, quorum_id: int = 0, lineage: int = 1, **more: Any) -> Member:
    """A member holding (step, quorum_id)."""
    return Member(name, Version(step, quorum_id), lineage, **more)


def new_rank(name: str, *, lineage: int = 1, now: float = 0.0, **more: Any) -> CheckedRank:
    """One rank that has just started."""
    return CheckedRank(RankSettings(name, **more), lineage=lineage, now=now)


def wish(*, prefetch: bool = False, hands_over: bool = False, timeout_s: float = QUORUM_S, **template: Any) -> Wish:
    """What a script wants of the next quorum; `template` are fields of its ask."""
    return Wish(Ask("", 0, **template), "room", timeout_s, prefetch, hands_over)


def only(actions: Iterable[do.Action], kind: type[A]) -> A:
    """The one action of that kind."""
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def kinds(actions: Iterable[do.Action]) -> list[str]:
    """The names of actions, in order."""
    return [type(action).__name__ for action in actions]


class Rig:
    """Members that ask, enter, launch and count together."""

    def __init__(self, names: Iterable[str] = "abc", **more: Any) -> None:
        self.ranks = {name: new_rank(name, lineage=number + 1, **more) for number, name in enumerate(names)}
        self.next_id = 1
        self.now = 0.0
        self.heals = True
        """What is planned to be received arrives at once."""

    def __getitem__(self, name: str) -> CheckedRank:
        return self.ranks[name]

    def _chosen(self, names: Iterable[str]) -> list[str]:
        return list(names) or list(self.ranks)

    def handle(self, name: str, *events: on.Event) -> tuple[do.Action, ...]:
        """Hand a rank events, one after the other, and perform what follows. Returns all actions."""
        done: list[do.Action] = []
        waiting = list(events)
        while waiting:
            actions = self[name].handle(waiting.pop(0), self.now)
            done += actions
            for action in actions:
                waiting += self._performed(action)
        return tuple(done)

    def _performed(self, action: do.Action) -> list[on.Event]:
        match action:
            case do.Prefetch():
                return [on.PrefetchEnded()]
            case do.Configure(plan):
                return [on.GroupsUp(plan.quorum_id)]
            case do.Receive(plan) if self.heals:
                applied = [on.StateApplied(None, 0, 0)] if plan.heals_first else []
                return [on.StateReceived(plan.quorum_id), *applied]
        return []

    def all(self, event: on.Event, names: Iterable[str] = "") -> None:
        """The same event on several ranks."""
        for name in self._chosen(names):
            self.handle(name, event)

    def fail(self, names: Iterable[str] = "", reason: str = "test") -> None:
        """A collective failed on these ranks."""
        self.all(on.CollectiveFailed(CollectiveError(reason)), names)

    # ------------------------------------------------------------ a quorum forms

    def ask(self, name: str, **wanted: Any) -> Ask:
        """What one rank asks for at its boundary."""
        return only(self.handle(name, on.QuorumWanted(wish(**wanted))), do.SendAsk).ask

    def quorum(self, asks: Iterable[Ask]) -> Quorum:
        """The next quorum of those who ask."""
        self.next_id += 1
        members = sorted((Member.of(ask) for ask in asks), key=lambda m: m.replica_id)
        return Quorum(self.next_id << 32 | 7, tuple(members))

    @property
    def coming_id(self) -> int:
        """quorum_id of the next quorum."""
        return (self.next_id + 1) << 32 | 7

    def answer(self, name: str, quorum: Quorum) -> tuple[do.Action, ...]:
        """The lighthouse answers the ask that is open."""
        return self.handle(name, on.QuorumAnswered(self[name].asks, quorum))

    def form(self, names: Iterable[str] = "", *, heal: bool = True, **wanted: Any) -> dict[str, Plan]:
        """All of `names` ask and are in one quorum, its groups up; without `heal` planned state does not come."""
        asks = [self.ask(name, **wanted) for name in self._chosen(names)]
        quorum, self.heals = self.quorum(asks), heal
        plans = {}
        for name in quorum.ids:
            plans[name] = only(self.answer(name, quorum), do.Entered).plan
            assert self[name].phase is Phase.OPEN, self[name]
        return plans

    # ------------------------------------------------------------ a step

    def sums(self, names: Iterable[str] = "") -> list[float]:
        """Everybody launches and sends its ballot: their sum."""
        ballots = []
        for name in self._chosen(names):
            assert self[name].may_launch(self.now)
            ballots.append(self[name].ballot(self.now))
        return [sum(column) for column in zip(*ballots, strict=True)]

    def count(self, names: Iterable[str] = "", *, tamper: Sequence[float] | None = None) -> dict[str, Verdict]:
        """The same sum arrives everywhere."""
        chosen, sums = self._chosen(names), self.sums(names)
        return {name: self[name].count(tamper or sums, self.now).verdict for name in chosen}

    def settle(self, names: Iterable[str] = "") -> dict[str, bool]:
        """Everybody votes, and follows its own vote, as groups of one do; what should_commit returns to each."""
        out = {}
        for name in self._chosen(names):
            rank = self[name]
            vote = rank.own_vote()
            if vote.outcome is not Outcome.BROKEN and rank.attempt.heal is Heal.READY:
                self.handle(name, on.StateApplied(None, 0, 0))
            out[name] = rank.settle(vote).commit
        return out

    def attempt(self, names: Iterable[str] = "") -> dict[str, bool]:
        """One whole attempt; what should_commit returns to each."""
        self.count(names)
        return self.settle(names)


def trained(names: Iterable[str] = "abc", **more: Any) -> Rig:
    """Members after their first committed step."""
    rig = Rig(names, **more)
    rig.form()
    assert all(rig.attempt().values())
    return rig
