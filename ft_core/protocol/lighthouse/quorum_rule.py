"""The rule that decides whether a quorum may form now. Pure: no clock, no I/O.

`decide(view)` looks at one room at one instant and returns either the member list of the next quorum (`Formed`) or the
reason why not yet together with the next instant at which the answer could change by itself (`NotReady`). It is the
place of rules R1 (no new quorum beside a living old one), R2 (no amnesia) and R9 (boot window); the caller
(`room.Room`) only keeps the facts it looks at.

Invariants: `decide` never forms a quorum of fewer than `need` members, never includes a replica that did not ask, and
never forms one beside a current quorum that has not ended.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.candidates import choose
from ft_core.protocol.lighthouse.reasons import UNTIL, late, story
from ft_core.protocol.lighthouse.view import ABSENT, Formed, Life, NotReady, Seen, View
from ft_core.protocol.types import UNTRAINED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ft_core.protocol.lighthouse.candidates import Choice


def orphaned_at(view: View, ids: Sequence[str]) -> float | None:
    """The instant at which all of `ids` have been without a lease for orphan_s; None while one of them has a lease.

    Who was away from here may have had a lease at the other lighthouse until contact with that was made (R22).
    """
    latest = 0.0
    for replica_id in ids:
        seen = view.seen.get(replica_id) or Seen(replica_id, Life.UNKNOWN, since=-inf)
        if seen.life is Life.GONE:
            continue
        if seen.life is Life.UP:
            return None
        latest = max(latest, max(seen.since, view.met_at) + view.orphan_s)
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
    """Wait for members to return: right after its start a lighthouse may have forgotten a quorum (R9)."""
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
    """Wait for the current quorum to end: frozen or cut off, it may still commit beside a new one (R1)."""
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
    """Wait for whoever holds newer published state: a majority of names is not one of memories (R2)."""
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
            # A member of a presented quorum is expected until liveness or a peer's report removes it (R9).
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
