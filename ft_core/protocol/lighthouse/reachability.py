"""Links that are cut between replicas, and the largest quorum whose members all reach each other. Pure.

How it works. An ask names the members of its last quorum that its group could not connect to (`Ask.unreachable`) and
those it could (`Ask.reached`). `Reachability` keeps the pairs that are cut. It is cut as long as one side reports it;
who is in a quorum again does not look any more, so its statement ages, and the other side's later "reached" overrules
it, after a hold that doubles each time the same pair is cut anew. Without any statement an aged one is tried again
after `Holds.retry_s` (doubling as well). So a cut that only one side can see, or a firewall that only lets one side
connect, costs a failed attempt now and then, and never stops the others.

`largest` picks the members. Exact for up to EXACT replicas with a cut link (all subsets of them are looked at); beyond,
greedy: the replica with the most cut links goes, until none is left.

Invariants: at most MAX_LINKS pairs are kept; a replica without a cut link is never left out; the newest stable state is
always among those picked (else no quorum could form: R2).
Ownership: `room.Room`; `candidates.choose` calls `hold_unreachable`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ft_core.protocol.lighthouse.rules import Rules
    from ft_core.protocol.lighthouse.view import Seen, View
    from ft_core.protocol.types import Ask, Version

MAX_LINKS = 4096
"""Cut pairs that are remembered; the oldest is forgotten for a newer one."""
EXACT = 12
"""Replicas with a cut link up to which the largest quorum is found exactly (2^12 subsets)."""

Pair = tuple[str, str]


def pair(one: str, other: str) -> Pair:
    """The key of a link, whoever named it."""
    return (one, other) if one < other else (other, one)


@dataclass(slots=True)
class Link:
    """One pair of replicas that could not reach each other."""

    since: float
    times: int = 1
    """How often it was cut."""
    reported_by: set[str] = field(default_factory=set)
    """The sides that report it now."""
    aged: set[str] = field(default_factory=set)
    """The sides that reported it, and have trained since."""
    reached: bool = False
    """The other side has reached it since."""

    def until(self, holds: Holds) -> float:
        """When it is tried again, if nothing more is reported."""
        if self.reported_by:
            return math.inf
        if not self.aged:
            return self.since
        if self.reached:
            wait_s = 0.0 if self.times == 1 else holds.hold_s * 2.0 ** (self.times - 2)
        else:
            wait_s = holds.retry_s * 2.0 ** (self.times - 1)
        return self.since + min(holds.max_s, wait_s)


@dataclass(frozen=True, slots=True)
class Holds:
    """How long a link is taken as cut after the last statement about it."""

    hold_s: float = 10.0
    """It was cut for the second time, and one side reaches the other; doubles each time."""
    retry_s: float = 60.0
    """Nobody has reported anything since; doubles as well."""
    max_s: float = 600.0


class Reachability:
    """The cut links of one room."""

    def __init__(self, holds: Holds | None = None) -> None:
        self.holds = holds or Holds()
        self._links: dict[Pair, Link] = {}

    def __repr__(self) -> str:
        return f"Reachability({', '.join(f'{a} / {b}' for a, b in self._links) or 'nothing is cut'})"

    def stated(self, ask: Ask, unreachable: Iterable[str], now: float) -> list[str]:
        """An ask names whom its group could not reach, and whom it could. Returns a line for the log per new cut.

        `unreachable`: those of them that have a lease; whose lease has ended is not cut off but absent.
        """
        replica_id = ask.replica_id
        new: list[Pair] = []
        for other in unreachable:
            if other == replica_id:
                continue
            key = pair(replica_id, other)
            link = self._links.get(key)
            if link is None:
                if len(self._links) >= MAX_LINKS:
                    self._links.pop(next(iter(self._links)))
                link = self._links[key] = Link(now)
                new.append(key)
            elif now >= link.until(self.holds):
                link.since, link.times = now, link.times + 1
                new.append(key)
            link.reported_by.add(replica_id)
            link.aged.discard(replica_id)
            link.reached = False
        for other in ask.reached:
            reached = self._links.get(pair(replica_id, other))
            if reached is not None:
                reached.reported_by.discard(replica_id)
                reached.aged.discard(replica_id)
                reached.reached = True
        return [f"{one} and {other} cannot reach each other, reports {replica_id}" for one, other in new]

    def returned(self, replica_id: str) -> None:
        """It has a lease again after an absence: what was reported about it, and by it, is old."""
        for key, link in self._links.items():
            if replica_id in key:
                link.aged |= link.reported_by
                link.reported_by.clear()
                link.reached = True

    def formed(self, members: Collection[str]) -> None:
        """These are in a quorum: they do not look any more whether they reach those that are not."""
        for link in self._links.values():
            trains = link.reported_by.intersection(members)
            link.reported_by -= trains
            link.aged |= trains

    def committed(self, members: Collection[str]) -> None:
        """A quorum of these works: no link between them is cut."""
        for key in [key for key in self._links if key[0] in members and key[1] in members]:
            del self._links[key]

    def cut(self, now: float, rules: Rules) -> frozenset[Pair]:
        """The pairs that cannot be in one quorum now."""
        if not rules.leave_out_unreachable:
            return frozenset()
        return frozenset(key for key, link in self._links.items() if now < link.until(self.holds))

    def next_at(self, now: float) -> float:
        """When a pair is tried again although nothing happens before; `now`: never."""
        return min(
            (at for link in self._links.values() if now < (at := link.until(self.holds)) < math.inf), default=now
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """The standing of a replica when some have to be left out."""

    replica_id: str
    newest: Version
    """The state it holds: what it asks with, else what it last reported as stable."""
    trains: bool
    """It is in the running quorum and has not asked: it goes on where it is, all else being equal."""


def largest(here: Sequence[Standing], cut: Collection[Pair], stable: Version) -> frozenset[str]:
    """The largest group of which all members reach each other and one is at least at `stable`.

    Of equally large ones: the one with more members that train, then with the newest state, then with the lower names.
    """
    by_id = {s.replica_id: s for s in here}
    links = [p for p in cut if p[0] in by_id and p[1] in by_id]
    involved = sorted({i for p in links for i in p})
    free = [s for s in here if s.replica_id not in set(involved)]
    if len(involved) > EXACT:
        group = free + _greedy([by_id[i] for i in involved], links)
        if all(s.newest < stable for s in group):
            holder = max(here, key=lambda s: (s.newest, s.trains))
            group = free + _greedy([by_id[i] for i in involved], links, holder.replica_id)
        return frozenset(s.replica_id for s in group)
    bit = {replica_id: 1 << n for n, replica_id in enumerate(involved)}
    blocked = [bit[a] | bit[b] for a, b in links]
    best: tuple[tuple[bool, int, int, Version], tuple[str, ...]] | None = None
    for chosen in range(1 << len(involved)):
        if any(chosen & both == both for both in blocked):
            continue
        group = free + [by_id[i] for i in involved if chosen & bit[i]]
        if not group:
            continue
        newest = max(s.newest for s in group)
        rank = (newest >= stable, len(group), sum(s.trains for s in group), newest)
        names = tuple(sorted(s.replica_id for s in group))
        if best is None or rank > best[0] or (rank == best[0] and names < best[1]):
            best = rank, names
    return frozenset(best[1]) if best else frozenset()


def _greedy(involved: Sequence[Standing], links: Sequence[Pair], kept: str = "") -> list[Standing]:
    """Leave out the replica with the most cut links until none is left; never `kept`."""
    left = {s.replica_id: s for s in involved}
    open_links = list(links)
    while open_links:
        count = Counter(i for link in open_links for i in link if i != kept)
        worst = max(sorted(count), key=lambda i: (count[i], not left[i].trains, -left[i].newest.step, i))
        del left[worst]
        open_links = [link for link in open_links if worst not in link]
    return list(left.values())


def hold_unreachable(view: View, candidates: dict[str, Seen], held: dict[str, str]) -> frozenset[str]:
    """Hold back who cannot reach the others: moves them from `candidates` to `held` with the reason.

    The members of the running quorum that have not asked yet count as well, because they will. Returns all who are left
    out, of those too.
    """
    members = view.current.members if view.current else ()
    absent = {*candidates, *held}
    running = {i: s for i in members if i not in absent and (s := view.seen.get(i)) is not None and s.up}
    here = {**running, **candidates}
    if not any(a in here and b in here for a, b in view.cut):
        return frozenset()
    stable = max(s.stable for s in here.values())
    standings = [
        Standing(i, s.stable if s.ask is None else s.ask.version, i in running) for i, s in sorted(here.items())
    ]
    group = largest(standings, view.cut, stable)
    for replica_id in sorted(set(candidates) - group):
        apart = sorted(b if a == replica_id else a for a, b in view.cut if replica_id in (a, b))
        apart = [i for i in apart if i in group] or apart
        del candidates[replica_id]
        held[replica_id] = (
            f"{replica_id} and {', '.join(apart)} cannot reach each other (network): {len(group)} of {len(here)} "
            "groups that reach each other go on without it until they can"
        )
    return frozenset(here) - group
