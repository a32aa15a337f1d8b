"""What the dashboard remembers of a room: rates, throughput over time, quorums, heals, what happened. Pure.

How it works. `RoomHistory.take` is given each sample; `noted` what happened in between. Throughput and members go into
two `Series`, one point a second and one a minute. A heal begins when a member of a new quorum holds an older state than
the others, or reports that it receives one, and ends when it reports the newer step, or is lost.

Invariants: every buffer is bounded (SECONDS, MINUTES, QUORUMS_MAX, HEALS_MAX, STORY_MAX); a replica that the lighthouse
has forgotten is forgotten here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ft_core.dashboard.rate import Rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.dashboard.sample import Note, ReplicaSample, RoomSample

SECONDS = 600
"""Points of the last ten minutes."""
MINUTES = 1440
"""Points of the last day."""
QUORUMS_MAX = 50
HEALS_MAX = 50
STORY_MAX = 100
UP = "up"
"""The life of a replica with a lease."""


class Point(NamedTuple):
    """One piece of time, as the page draws it."""

    begin: float
    """A multiple of the series' `every_s`."""
    rate: float
    """Steps per second: the mean of the looks."""
    members: int
    """The fewest members that were seen."""


class Series:
    """Points of `every_s` seconds each, the last `length` of them. Pieces of time without a look are not there."""

    def __init__(self, every_s: float, length: int) -> None:
        self.every_s = every_s
        self.points: deque[Point] = deque(maxlen=length)
        self._looks = 0
        """Of the last point."""

    def __repr__(self) -> str:
        return f"Series({self.every_s:g} s, {len(self.points)} points)"

    def look(self, now: float, rate: float, members: int) -> None:
        """How it is now."""
        begin = now - now % self.every_s
        last = self.points[-1] if self.points else None
        if last is None or begin > last.begin:
            self._looks = 1
            self.points.append(Point(begin, round(rate, 3), members))
            return
        self._looks += 1
        mean = last.rate + (rate - last.rate) / self._looks
        self.points[-1] = Point(last.begin, round(mean, 3), min(last.members, members))


@dataclass(slots=True)
class QuorumSeen:
    """One quorum."""

    quorum_id: int
    at: float
    members: tuple[str, ...]
    joined: tuple[str, ...]
    without: tuple[str, ...]
    step: int
    ended_at: float = 0.0
    """0: it has not ended."""
    lost: str = ""
    """The first member that it lost, and how that was noticed, as a phrase; '': none."""
    reason: str = ""
    """Why it ended."""


@dataclass(slots=True)
class HealSeen:
    """One replica receives the others' state."""

    replica_id: str
    at: float
    to_step: int
    """The step of that state; 0: not known."""
    from_step: int
    ended_at: float = 0.0
    ok: bool = False
    bytes: int = 0
    total: int = 0
    """Bytes of the whole state; 0: it has not reported any."""


class RoomHistory:
    """What is remembered of one room."""

    def __init__(self) -> None:
        self.rate = Rate()
        self.step = 0
        """The newest step that a member reported."""
        self.fine = Series(1.0, SECONDS)
        self.coarse = Series(60.0, MINUTES)
        self.quorums: deque[QuorumSeen] = deque(maxlen=QUORUMS_MAX)
        self.heals: deque[HealSeen] = deque(maxlen=HEALS_MAX)
        self.story: deque[Note] = deque(maxlen=STORY_MAX)
        self._rates: dict[str, Rate] = {}
        self._living_at = float("-inf")
        self._planned = 0
        """The last quorum that was looked at for who heals."""

    def __repr__(self) -> str:
        return f"RoomHistory({len(self.quorums)} quorums, {len(self.heals)} heals, {self.fine!r})"

    def rate_of(self, replica_id: str, now: float) -> float:
        """Steps per second of one replica."""
        rate = self._rates.get(replica_id)
        return rate.per_s(now) if rate is not None else 0.0

    def heal_of(self, replica_id: str) -> HealSeen | None:
        """Its heal that is under way."""
        return next((h for h in reversed(self.heals) if h.replica_id == replica_id and not h.ended_at), None)

    # ------------------------------------------------------------ what happened

    def noted(self, note: Note) -> None:
        """Something happened in this room."""
        fields = note.fields
        if note.kind == "quorum_formed":
            members, joined, without = (tuple(fields[name]) for name in ("members", "joined", "without"))
            self.quorums.append(QuorumSeen(fields["quorum_id"], note.at, members, joined, without, fields["step"]))
        elif note.kind in ("quorum_ended", "member_lost"):
            for quorum in self.quorums:
                if quorum.quorum_id == fields["quorum_id"] and not quorum.ended_at:
                    if note.kind == "member_lost":
                        quorum.lost = quorum.lost or sentence(note)
                    else:  # that the others asked for the next one then says less
                        quorum.ended_at, quorum.reason = note.at, quorum.lost or fields["reason"]
        self.story.append(note)

    # ------------------------------------------------------------ how it is

    def take(self, room: RoomSample, now: float) -> None:
        """How the room is now; `noted` comes first."""
        self._rates = {r.replica_id: self._rates.get(r.replica_id) or Rate() for r in room.replicas}
        living = {r.replica_id: r for r in room.replicas if r.life == UP}
        members = [living[i] for i in room.members if i in living]
        known = room.formed is not None and room.formed.quorum_id == room.quorum_id
        # Who receives state, warms up or loads a checkpoint reports a step that is not the room's, and the steps up to
        # there were not made meanwhile. Nor were those of a quorum that another lighthouse formed: until its members
        # have reported, they seem to be at 0.
        for replica in members:
            if replica.step or known:
                self._rates[replica.replica_id].look(now, replica.step)
        self.step = max((r.step for r in members), default=self.step)
        if members and (self.step or known):
            self.rate.look(now, self.step)
        count = 0 if room.ended else len(members)
        if living:
            self._living_at = now
        if now - self._living_at < SECONDS:  # a room that is over does not fill its charts with zeros
            for series in (self.fine, self.coarse):
                series.look(now, self.rate.per_s(now), count)
        self._plan_heals(room, now)
        for replica in living.values():
            self._reported(replica, now, member=replica.replica_id in room.members, planned=known)
        for heal in self.heals:
            if not heal.ended_at and heal.replica_id not in living:
                heal.ended_at = now

    def _plan_heals(self, room: RoomSample, now: float) -> None:
        """A new quorum: who in it is behind?"""
        formed = room.formed
        if formed is None or formed.quorum_id == self._planned or formed.quorum_id != room.quorum_id:
            return
        self._planned = formed.quorum_id
        since = next((q.at for q in reversed(self.quorums) if q.quorum_id == formed.quorum_id), now)
        target = max(member.version.step for member in formed.members)
        for member in formed.members:
            if member.version.step == target:
                self._not_needed(member.replica_id)
            else:
                replica_id, step = member.replica_id, max(0, member.version.step)
                heal = self.heal_of(replica_id) or self._begin(replica_id, since, step)
                heal.to_step = target

    def _begin(self, replica_id: str, now: float, from_step: int) -> HealSeen:
        heal = HealSeen(replica_id, now, 0, from_step)
        self.heals.append(heal)
        return heal

    def _not_needed(self, replica_id: str) -> None:
        """What it copied before it joined, or began to: all have the same state now, as where the donors are gone."""
        heal = self.heal_of(replica_id)
        if heal is not None:
            self.heals.remove(heal)

    def _reported(self, replica: ReplicaSample, now: float, *, member: bool, planned: bool) -> None:
        done, total = replica.healed
        heal = self.heal_of(replica.replica_id)
        # What is left of a heal that failed is reported on; of a member it is known who heals (`_plan_heals`).
        if heal is None and total and done < total and not (member and planned):
            heal = self._begin(replica.replica_id, now, replica.step)
        if heal is None:
            return
        if not (total or heal.to_step):
            self._not_needed(replica.replica_id)
            return
        if total:
            heal.bytes, heal.total = done, total
        # Without a plan, in a quorum that another lighthouse formed, it has ended once all is there.
        if replica.step >= heal.to_step > 0 or (member and not heal.to_step and done >= total):
            heal.ended_at, heal.ok = now, True
            rate = self._rates[replica.replica_id] = Rate()  # it did not make the steps up to here
            rate.look(now, replica.step)


def by_room(histories: Mapping[str, RoomHistory], rooms: tuple[str, ...]) -> dict[str, RoomHistory]:
    """The histories of these rooms, new where there are none; others are forgotten."""
    return {name: histories.get(name) or RoomHistory() for name in rooms}


def sentence(note: Note) -> str:
    """What happened, for users; '': nothing that they need to know."""
    f: Mapping[str, Any] = note.fields
    match note.kind:
        case "quorum_formed":
            who = f"a quorum of {len(f['members'])} at step {f['step']}"
            joined = f"; joined: {', '.join(f['joined'])}" if f["joined"] else ""
            return who + joined + (f"; without: {', '.join(f['without'])}" if f["without"] else "")
        case "member_lost":
            return f"lost {f['replica_id']}: {f['how']}"
        case "goodbye":
            return f"{f['replica_id']} left: {f['reason']}"
        case "refused":
            return f"refused {f['replica_id']}: {f['reason']}"
        case "lease_opened":
            return f"{f['replica_id']} connected"
        case "no_quorum_yet":
            return f"no quorum: {f['reason']}"
        case "stood_still":
            return f"the lighthouse itself stood still for {f['seconds_s']:.1f} s"
        case "pair":
            return _pair(f)
        case "order":
            return f"{f['replica_id']} was ordered to {f['what']}: {f['reason']}"
        case _:
            return ""


def _pair(f: Mapping[str, Any]) -> str:
    other = f["other"]
    if f["took_over"]:
        return f"this lighthouse took the place of {other}, which cannot be reached"
    if f["role"] != f["before"]:
        return f"this lighthouse {'is active' if f['role'] == 'active' else 'stands by'} from now on"
    return f"{other} stands by" if f["contact"] else f"nobody stands by: {other} cannot be reached"
