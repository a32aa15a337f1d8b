"""What a quorum is, and the rule that decides whether one may form now. Pure: no clock, no I/O.

`decide(view)` looks at one room at one instant and returns either the member list of the next quorum (`Formed`) or the
reason why not yet together with the next instant at which the answer could change by itself (`NotReady`). It is the
place of rules R1 (no new quorum beside a living old one), R2 (no amnesia) and R9 (boot window); the caller
(`membership.Room`) only keeps the facts it looks at.

Invariants: `decide` never forms a quorum of fewer than `need` members, never includes a replica that did not ask, and
never forms one beside a current quorum that has not ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from ft_core.candidates import choose
from ft_core.reasons import UNTIL, late, story
from ft_core.room_rules import Rules as Rules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ft_core.candidates import Choice


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Identity of a state: the step, and the quorum_id in which the last commit was made. Compared in this order."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return "void" if self.step < 0 else f"step {self.step}"


UNTRAINED = Version(0, 0)
VOID = Version(-1, -1)
"""A state that must not be used: torn by a heal that did not finish, or mixed within its group."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One replica group's wish to be in the next quorum. Irrevocable; with the same `seq` it is the same ask."""

    replica_id: str
    seq: int
    version: Version = UNTRAINED
    lineage: int = 0
    quorum_id: int = 0
    """The quorum the group leaves by asking; 0 if it was in none."""
    failed: bool = False
    """The data plane of that quorum broke under this group: a second witness to a dropped lease."""
    reason: str = ""
    min_replicas: int = 1
    group_world_size: int = 1
    heal_addresses: tuple[str, ...] = ()
    store_address: str = ""
    address: str = ""
    layout: int = 0
    layout_lines: tuple[str, ...] = ()
    """One line per parameter, in a group's first ask only: to name the first difference to the room's model."""
    init_sync: bool = True
    allow_heal: bool = True
    shrink_only: bool = False
    heals_before_forward: bool = False
    heals_late: bool = False
    """Its last heal failed when the others counted on it: they do not, until it holds their state (R11)."""
    from_scratch: bool = False
    """It may begin at step 0 although the job has committed: its user says so, or it has loaded a checkpoint (R21)."""
    open_attempt: int = -1
    """The attempt of `quorum_id` whose outcome this group could not follow, its reduced gradients kept (R5); or -1."""
    commit_failures: int = 0
    data: str = ""
    unbuilt: str = ""
    """Why it could not build the process group of that quorum; `unbuilt_here`: because of its own machine."""
    unbuilt_here: bool = False
    stable: Version = VOID
    """The newest version it knows to be held by its whole quorum (R2): newer than its last report, perhaps."""
    unreachable: tuple[str, ...] = ()
    """Members of its last quorum to which it could open no connection; `reached`: those to which it could."""
    reached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """One group in a quorum: what the others need to know of its ask."""

    replica_id: str
    version: Version
    lineage: int
    group_world_size: int = 1
    heal_addresses: tuple[str, ...] = ()
    store_address: str = ""
    address: str = ""
    init_sync: bool = True
    allow_heal: bool = True
    shrink_only: bool = False
    heals_before_forward: bool = False
    heals_late: bool = False
    previous_quorum_id: int = 0
    open_attempt: int = -1
    commit_failures: int = 0
    data: str = ""

    @staticmethod
    def of(ask: Ask) -> Member:
        """The part of an ask that goes into the quorum."""
        return Member(
            replica_id=ask.replica_id, version=ask.version, lineage=ask.lineage,
            group_world_size=ask.group_world_size, heal_addresses=ask.heal_addresses,
            store_address=ask.store_address, address=ask.address, init_sync=ask.init_sync,
            allow_heal=ask.allow_heal, shrink_only=ask.shrink_only,
            heals_before_forward=ask.heals_before_forward, heals_late=ask.heals_late, previous_quorum_id=ask.quorum_id,
            open_attempt=ask.open_attempt, commit_failures=ask.commit_failures, data=ask.data,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quorum:
    """An agreed member list, sorted by replica_id; a member's index is its replica_rank."""

    quorum_id: int
    members: tuple[Member, ...]
    created_ms: int = 0

    def rank_of(self, replica_id: str) -> int:
        """replica_rank of a member. Raises ValueError if it is not in this quorum."""
        return next(rank for rank, member in enumerate(self.members) if member.replica_id == replica_id)

    @property
    def ids(self) -> tuple[str, ...]:
        """replica_ids in rank order."""
        return tuple(member.replica_id for member in self.members)


class Life(Enum):
    """What the lighthouse believes of a replica."""

    UP = "up"
    CLOSED = "closed"
    """Its lease ended within a heartbeat of its last message: the connection was closed. It may be re-opened."""
    LOST = "lost"
    """Its connection closed, and it did not return or its quorum broke as well (`absence`): not waited for any more,
    but never *certainly* gone; a proxy may have closed the connection of a replica that trains on."""
    MISSED = "missed"
    """Its lease ended after silence: frozen or cut off, it may still be alive (never *certainly* gone)."""
    UNKNOWN = "unknown"
    """Named in a presented quorum, never seen under this boot (R9)."""
    GONE = "gone"
    """Certain: it left, a supervisor saw it end, or it was in no quorum and holds nothing that could be missed."""


ABSENT = (Life.LOST, Life.MISSED)
"""Out of reach, but perhaps alive: not waited for, and not forgotten before orphan_s."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What `decide` needs to know of one replica."""

    replica_id: str
    life: Life
    since: float
    """When `life` began."""
    stable: Version = VOID
    """The newest version it reported as held by every member of its quorum (R2)."""
    ask: Ask | None = None
    asked_at: float = 0.0
    paused_until: float = 0.0
    phase: str = ""
    admitted_at: float = 0.0
    """Not a candidate before this instant (crash-loop debounce, or a living `twin`); 0: at once."""
    twin: str = ""
    """The living replica of the same name because of which it waits."""
    incomplete: str = ""
    """Which of its ranks is missing: it is not waited for, nor is its ask taken, before all of them are back (R12)."""
    back_at: float = 0.0
    """When its last pause ended: as in any wait for it, the time that it has to arrive counts from then."""
    min_replicas: int = 1
    """What its lease was opened with; its ask may know better (`minimum`)."""
    held_back: str = ""
    """Why it may not join before `admitted_at`, where that is more than that it crashed (`build_log`)."""

    @property
    def up(self) -> bool:
        """It has a lease."""
        return self.life is Life.UP

    @property
    def minimum(self) -> int:
        """The smallest quorum it agrees to be in."""
        return self.min_replicas if self.ask is None else self.ask.min_replicas


@dataclass(frozen=True, slots=True)
class Current:
    """The quorum that is in force, as far as this lighthouse knows."""

    quorum_id: int
    members: tuple[str, ...]
    ended: bool
    """A member asked after it, left, or is certainly gone; or all of it closed before a commit was reported."""
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """One room at one instant."""

    now: float
    seen: Mapping[str, Seen]
    current: Current | None
    min_replicas: int = 1
    expected: int = 0
    """How many groups the job is configured with (FT_NUM_REPLICA_GROUPS), less those given up; 0: unknown."""
    join_timeout_s: float = 0.1
    join_s: float = 10.0
    orphan_s: float = 900.0
    boot_until: float = 0.0
    restart_until: float = 0.0
    """boot + orphan_s: until then a lighthouse that knows no quorum may be one that forgot it (R9)."""
    rules: Rules = field(default_factory=Rules)
    trained: bool = False
    """Somebody has shown trained state since the lighthouse started."""
    cut: frozenset[tuple[str, str]] = frozenset()
    """Pairs of replicas that cannot reach each other (`reachability`)."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A quorum may form now, of these asks (sorted by replica_id). `left_out` maps living members to why."""

    asks: tuple[Ask, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NotReady:
    """No quorum yet: `reason` is a sentence for users; `at` is when to look again if nothing happens before."""

    reason: str
    at: float | None
    waiting_for: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    """Who asks and would not be in it either, with the sentence that says why (`candidates.choose`)."""
    paused_until: float = 0.0
    """Until when somebody who has not asked may be busy, as it announced (0: nobody): counts against nobody's limit."""
    void: tuple[Ask, ...] = ()
    """Those who ask, if none of them holds a usable state."""


def orphaned_at(view: View, ids: Sequence[str]) -> float | None:
    """The instant at which all of `ids` have been without a lease for orphan_s; None while one of them has a lease."""
    latest = 0.0
    for replica_id in ids:
        seen = view.seen.get(replica_id)
        if seen is None or seen.life is Life.GONE:
            continue
        if seen.life is Life.UP:
            return None
        latest = max(latest, seen.since + view.orphan_s)
    return latest


def decide(view: View) -> Formed | NotReady:
    """Decide whether the room's next quorum may form now.

    Returns:
        Formed with every candidate, or NotReady with a reason and the next instant of interest.
    """
    outcome = _decide(view)
    if isinstance(outcome, Formed):
        return outcome
    until = max((s.paused_until for s in view.seen.values() if s.life is Life.UP and s.ask is None), default=0.0)
    return replace(outcome, paused_until=until) if until > view.now else outcome


def _decide(view: View) -> Formed | NotReady:
    asking = {s.replica_id: s for s in view.seen.values() if s.ask is not None and s.life is Life.UP}
    if not asking:
        return NotReady("nobody asks for a quorum", None)
    choice = choose(view, asking)
    outcome = _form(view, choice)
    return replace(outcome, held=choice.held) if isinstance(outcome, NotReady) and choice.held else outcome


def _form(view: View, choice: Choice) -> Formed | NotReady:
    candidates = choice.candidates
    if not candidates:
        return NotReady("; ".join(why for _, why in sorted(choice.held.items())), choice.at)

    blocked = _booting(view, candidates) or _old_quorum_lives(view) or _newer_state_elsewhere(view, candidates)
    blocked = blocked or _stragglers(view, candidates, sum(not view.seen[i].incomplete for i in choice.held))
    if blocked:
        return blocked

    if len(candidates) < choice.need:
        have = ", ".join(sorted(candidates))
        return NotReady(
            f"{len(candidates)} of the {choice.need} groups that min_replicas asks for are here ({have})", choice.at
        )
    left_out = {
        i: late(view, view.seen[i])
        for i in (view.current.members if view.current else ())
        if i not in candidates and i in view.seen and view.seen[i].life is Life.UP and view.seen[i].ask is None
    }
    asks = tuple(s.ask for _, s in sorted(candidates.items()) if s.ask is not None)
    if all(ask.version < UNTRAINED for ask in asks):
        why = f"{', '.join(ask.replica_id for ask in asks)} were interrupted while receiving theirs"
        return NotReady(f"no group holds a usable state: {why}", None, void=asks)
    return Formed(asks, left_out)


def due(view: View) -> dict[str, float]:
    """Until when the living members of a quorum that has ended may take to ask, whatever the next one waits for."""
    current = view.current
    if current is None or not current.ended:
        return {}
    asking = [s.asked_at for s in view.seen.values() if s.ask is not None and s.life is Life.UP]
    if not asking:
        return {}
    first = max(min(asking), current.ended_at)
    missing = [s for i in current.members if (s := view.seen.get(i)) and s.life is Life.UP and s.ask is None]
    return {s.replica_id: view.now if s.incomplete else _arrives_by(view, s, first) for s in missing}


def _arrives_by(view: View, seen: Seen, first: float) -> float:
    """Until when a living member is waited for, if somebody has asked since `first`."""
    return max(first, seen.paused_until, seen.back_at) + view.join_s


def _booting(view: View, candidates: Mapping[str, Seen]) -> NotReady | None:
    """R9: right after a start this lighthouse may have forgotten a quorum; give its members time to say so."""
    if not view.rules.r9_boot:
        return None
    everyone = view.expected and len(candidates) >= view.expected
    fresh = all(s.ask is not None and s.ask.version.step <= 0 for s in candidates.values())
    if view.current is not None:
        known = [view.seen.get(i) for i in view.current.members]
        unknown = [s.replica_id for s in known if s is not None and s.life is Life.UNKNOWN]
        if view.now < view.boot_until and unknown:
            return NotReady(
                f"the lighthouse has just started; {', '.join(sorted(unknown))} may still reconnect", view.boot_until
            )
        return None
    if view.now < view.boot_until and not everyone:
        return NotReady("the lighthouse has just started and waits for running groups to reconnect", view.boot_until)
    waits = view.trained or not view.rules.r9_only_trained
    if waits and fresh and view.expected and not everyone and view.now < view.restart_until:
        return NotReady(
            f"waiting for {view.expected - len(candidates)} of {view.expected} groups: those that are here are all "
            f"untrained, the others may hold trained state, as one has shown (until {view.orphan_s:g} s after the "
            "lighthouse's start)",
            view.restart_until,
        )
    return None


def _old_quorum_lives(view: View) -> NotReady | None:
    """R1: a frozen or cut-off quorum may still commit; none forms beside it before it has ended."""
    current = view.current
    if current is None or current.ended or not view.rules.r1_ended:
        return None
    at = orphaned_at(view, current.members)
    if at is not None and view.now >= at:
        return None
    unreachable = [i for i in current.members if (s := view.seen.get(i)) is not None and s.life is not Life.UP]
    if at is None:
        return NotReady("waiting for the running groups to reach their next step boundary", None)
    names = ", ".join(sorted(unreachable))
    if any(view.seen[i].life is Life.CLOSED for i in unreachable):
        return NotReady(f"the connection of {names} closed; waiting for it to return", at, tuple(sorted(unreachable)))
    return NotReady(
        f"the quorum of {names} may still be training out of reach; its place is free in {at - view.now:.0f} s "
        "(orphan_s), or as soon as one of them returns or its supervisor reports its end",
        at,
        tuple(sorted(unreachable)),
    )


def _newer_state_elsewhere(view: View, candidates: Mapping[str, Seen]) -> NotReady | None:
    """R2: a majority of names is not a majority of memories; wait for whoever holds newer published state."""
    if not view.rules.r2_no_amnesia:
        return None
    newest = max(s.ask.version for s in candidates.values() if s.ask is not None)
    for seen in view.seen.values():
        if seen.replica_id in candidates or seen.life is Life.GONE or seen.stable <= newest:
            continue
        at = orphaned_at(view, (seen.replica_id,))
        if at is not None and view.now >= at:
            continue
        return NotReady(
            f"{seen.replica_id} holds {seen.stable}, newer than the {newest} of those who ask ({story(view, seen)})"
            + ("" if at is None else f"; {UNTIL} it has been away for {view.orphan_s:g} s (orphan_s)"),
            at,
            (seen.replica_id,),
        )
    return None


def _stragglers(view: View, candidates: Mapping[str, Seen], held: int) -> NotReady | None:
    """Wait a bounded time for living members that do not ask yet, and for announced newcomers if there is no quorum."""
    first = min(s.asked_at for s in candidates.values())
    members = view.current.members if view.current else ()
    if view.current is not None:
        # A newcomer may have asked long ago: the members' time to arrive starts when their quorum ended.
        first = max(first, view.current.ended_at)
    waiting: list[Seen] = []
    until = 0.0
    for replica_id in members:
        seen = view.seen.get(replica_id)
        asks = seen is not None and seen.up and seen.ask is not None
        if seen is None or asks or seen.life in (Life.GONE, *ABSENT) or seen.incomplete:
            continue
        if seen.life is Life.UNKNOWN:
            # R9: a member of a presented quorum counts as expected until liveness or a peer's accusation removes it.
            deadline = max(view.boot_until, seen.since + view.join_s)
        elif seen.life is Life.CLOSED:
            deadline = view.now + view.join_s  # not this rule decides, but `absence`: it turns LOST
        else:
            deadline = _arrives_by(view, seen, first)
        if view.now < deadline:
            waiting.append(seen)
            until = max(until, deadline)
    if not view.current:
        missing = view.expected - len(candidates) - held
        if missing > 0 and view.now < first + view.join_s:
            return NotReady(
                f"{len(candidates)} of {view.expected} groups are here "
                f"({', '.join(sorted(candidates))}); waiting for the others",
                first + view.join_s,
            )
        announced = [s for s in view.seen.values() if s.life is Life.UP and s.ask is None]
        if announced and view.now < first + view.join_timeout_s:
            waiting += announced
            until = max(until, first + view.join_timeout_s)
    if not waiting:
        return None
    total = len(candidates) + len(waiting)
    stories = ", ".join(f"{s.replica_id} ({story(view, s)})" for s in sorted(waiting, key=lambda s: s.replica_id)[:4])
    more = f" and {len(waiting) - 4} more" if len(waiting) > 4 else ""
    return NotReady(
        f"waiting for {len(waiting)} of {total} groups: {stories}{more}",
        until,
        tuple(sorted(s.replica_id for s in waiting)),
    )
