"""`page`: everything the browser shows, as a dict of plain values; also /status.json. Pure.

How it works. A `Sample` and what is remembered (`history`) become one dict. `Memory` keeps the histories and hands each
note to its room. `changes` leaves out what the browser has already: long lists that did not change, and of the charts
all but the newest point, which is among the short fields.

Invariants: sizes are bounded by ROOMS_MAX, REPLICAS_MAX and the buffers of `history`; a room with living replicas is
shown before one without. Words are for users: each state has one, and each wait its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.dashboard.history import UP, RoomHistory, by_room, sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ft_core.dashboard.history import HealSeen, QuorumSeen
    from ft_core.dashboard.sample import Note, PairSample, ReplicaSample, RoomSample, Sample

FORM = 1
"""Version of the dict; a field that is added keeps it."""
ROOMS_MAX = 32
REPLICAS_MAX = 2048
ACTIVE, STANDBY = "active", "standby"
"""What a lighthouse of a pair may do."""
ROLES = {STANDBY: "stands by for the other lighthouse", ACTIVE: "active", "starting": "looks for the other lighthouse"}
"""The same in words for whoever may not see more."""
NAMES_MAX = 12
"""Names of who joined, or is missing, in one entry of the quorums' history; the rest is a number."""
LONG = ("quorums", "heals", "story")
"""Lists of a room that are sent again only when they have changed."""
CHARTS = ("fine", "coarse")
"""Lists of a room that are sent once: after that, their newest points (`newest`) are enough."""

Model = dict[str, Any]


class Memory:
    """The histories of all rooms, and the last sample."""

    def __init__(self) -> None:
        self.rooms: dict[str, RoomHistory] = {}
        self.sample: Sample | None = None

    def __repr__(self) -> str:
        return f"Memory({self.rooms})"

    def take(self, sample: Sample) -> None:
        """How everything is now."""
        self.rooms = by_room(self.rooms, tuple(room.name for room in sample.rooms))
        for note in sample.notes:
            where = note.fields.get("room")
            for name, history in self.rooms.items():
                if where in (None, name):
                    history.noted(note)
        for room in sample.rooms:
            self.rooms[room.name].take(room, sample.at)
        self.sample = sample

    def page(self) -> Model:
        """The page's values; `rooms` is empty before the first sample."""
        sample = self.sample
        if sample is None:
            return {"form": FORM, "at": 0.0, "pair": None, "rooms": [], "more_rooms": 0}
        living = {room.name: sum(r.life == UP for r in room.replicas) for room in sample.rooms}
        rooms = sorted(sample.rooms, key=lambda room: (not living[room.name], room.name))
        return {
            "form": FORM,
            "at": round(sample.at, 3),
            "release": sample.release,
            "uptime_s": round(sample.at - sample.started, 1),
            "liveness_s": sample.liveness_s,
            "pair": pair_page(sample.pair, sample.at) if sample.pair is not None else None,
            "rooms": [room_page(room, self.rooms[room.name], sample.at) for room in rooms[:ROOMS_MAX]],
            "more_rooms": max(0, len(rooms) - ROOMS_MAX),
        }


def changes(before: Model | None, after: Model) -> Model:
    """What a browser that has `before` needs to have `after`: in each room, the long lists that differ."""
    if before is None:
        return after
    known = {room["room"]: room for room in before["rooms"]}
    rooms = []
    for room in after["rooms"]:
        old = known.get(room["room"])
        if old is None:
            rooms.append(room)
            continue
        same = {*CHARTS, *(name for name in LONG if room[name] == old[name])}
        rooms.append({name: value for name, value in room.items() if name not in same})
    return {**after, "rooms": rooms}


# ---------------------------------------------------------------- one of two lighthouses


def pair_page(pair: PairSample, now: float) -> Model:
    """What this lighthouse of a pair does."""
    return {
        "role": pair.role,
        "other": pair.other,
        "since_s": round(now - pair.since, 1),
        "contact": pair.contact,
        "contact_s": round(now - pair.contact_since, 1),
        "complete": pair.complete,
        "took_over": pair.took_over,
        "alone": pair.role == ACTIVE and not pair.contact,
        "told": pair_words(pair, now),
    }


def pair_words(pair: PairSample, now: float) -> str:
    """The same in sentences."""
    lasts = _age(now - pair.since)
    if pair.role == STANDBY:
        return (
            f"This lighthouse stands by for {pair.other}, for {lasts} now: that one is active, and its dashboard shows "
            "the replicas. This one takes its place when it is gone; its records are "
            f"{'complete' if pair.complete else 'not complete'}."
        )
    if pair.role != ACTIVE:
        return f"This lighthouse has just started, and looks for {pair.other} before it serves."
    head = f"This lighthouse has been active for {lasts}"
    head += f", since it took the place of {pair.other}" if pair.took_over else ""
    if pair.contact:
        return f"{head}. {pair.other} stands by."
    return (
        f"{head}. Nobody stands by: {pair.other} has been out of contact for {_age(now - pair.contact_since)}. "
        "Start it (ft-lighthouse --peer), or see that the two reach each other."
    )


def _age(seconds: float) -> str:
    """How long, coarsely."""
    s = max(0.0, seconds)
    return f"{s:.0f} s" if s < 120 else f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.0f} h"


# ---------------------------------------------------------------- one room


def room_page(room: RoomSample, history: RoomHistory, now: float) -> Model:
    """One room."""
    in_force = bool(room.quorum_id) and not room.ended
    members = {replica_id: place for place, replica_id in enumerate(room.members)}
    shown = sorted(room.replicas, key=lambda r: (r.life != UP, r.replica_id not in members, r.replica_id))
    addresses = _addresses(room)
    begun = next((q.at for q in reversed(history.quorums) if q.quorum_id == room.quorum_id), 0.0)
    return {
        "room": room.name,
        "quorum": quorum_name(room.quorum_id) if in_force else "",
        "quorum_size": len(room.members) if in_force else 0,
        "connected": sum(r.life == UP and r.replica_id in members for r in room.replicas) if in_force else 0,
        "quorum_s": round(now - begun, 1) if in_force and begun else 0.0,
        "why": why_none(room),
        "waiting": room.reason if in_force and _asks(room) else "",
        "closed": room.closed,
        "given_up": [{"name": name, "reason": reason} for name, reason in sorted(room.given_up.items())],
        "step": history.step,
        "rate": round(history.rate.per_s(now), 3),
        "newest": {"fine": list(history.fine.points)[-1:], "coarse": list(history.coarse.points)[-1:]},
        "replicas": [
            replica_page(replica, room, history, addresses.get(replica.replica_id, ""), now)
            for replica in shown[:REPLICAS_MAX]
        ],
        "more_replicas": max(0, len(shown) - REPLICAS_MAX),
        "fine": list(history.fine.points),
        "coarse": list(history.coarse.points),
        "quorums": [_quorum(quorum) for quorum in reversed(history.quorums)],
        "heals": [_heal(heal) for heal in reversed(history.heals)],
        "story": _story(reversed(history.story)),
    }


def why_none(room: RoomSample) -> str:
    """Why there is no quorum, as a sentence; '': there is one."""
    if room.quorum_id and not room.ended:
        return ""
    if room.closed:
        return room.closed
    living = [r for r in room.replicas if r.life == UP]
    if not living:
        return "no replica is connected"
    if _asks(room):
        return room.reason or "a quorum is being formed"
    doing = ", ".join(f"{r.replica_id} ({r.phase or 'starting'})" for r in living[:4])
    more = f" and {len(living) - 4} more" if len(living) > 4 else ""
    return f"nobody asks for one yet; connected: {doing}{more}"


def _asks(room: RoomSample) -> bool:
    return any(r.asking for r in room.replicas)


def _addresses(room: RoomSample) -> dict[str, str]:
    """host:port of each replica's own server, or of where it serves its state."""
    found = {r.replica_id: r.heal_addresses[0] for r in room.replicas if r.heal_addresses}
    for member in room.formed.members if room.formed is not None else ():
        if member.address:
            found[member.replica_id] = member.address
    return {replica_id: address.rpartition("//")[2].partition("/")[0] for replica_id, address in found.items()}


# ---------------------------------------------------------------- one replica


def replica_page(replica: ReplicaSample, room: RoomSample, history: RoomHistory, address: str, now: float) -> Model:
    """One replica."""
    heal = history.heal_of(replica.replica_id)
    state, told = state_of(replica, room, heal, now)
    stable = replica.stable
    return {
        "id": replica.replica_id,
        "name": replica.name,
        "member": replica.replica_id in room.members and not room.ended,
        "state": state,
        "told": told,
        "step": replica.step,
        "rate": round(history.rate_of(replica.replica_id, now), 3) if replica.life == UP else 0.0,
        "version": f"{stable.step}@{quorum_name(stable.quorum_id)}" if stable.step > 0 else "",
        "release": replica.release,
        "ranks": replica.ranks,
        "address": address,
        "lease_s": round(replica.silence_s, 2) if replica.silence_s >= 0 else -1,
        "heal": [heal.bytes, heal.total] if heal is not None else [],
    }


def state_of(replica: ReplicaSample, room: RoomSample, heal: HealSeen | None, now: float) -> tuple[str, str]:
    """A word for what it does, and a phrase that says more."""
    since_s = max(0.0, now - replica.since)
    member = replica.replica_id in room.members and not room.ended
    match replica.life:
        case "closed":
            return "lost", "its connection has closed; it may come back"
        case "lost":
            return "lost", f"its connection closed {since_s:.0f} s ago"
        case "missed":
            return "lost", f"silent since {since_s:.0f} s: frozen or cut off"
        case "unknown":
            return "unknown", "in a running quorum, but not seen since this lighthouse was started"
        case "gone":
            return "gone", f"ended {since_s:.0f} s ago"
    if replica.incomplete:
        return "incomplete", replica.incomplete
    if replica.stalled:
        return "stalled", replica.stalled
    if heal is not None:
        return "healing", heal_words(heal)
    if replica.paused_until > now:
        return "paused", f"{replica.phase}, for at most {replica.paused_until - now:.0f} s more"
    if replica.asking:
        held = room.held.get(replica.replica_id, "")
        return "waiting", held or f"asks for a quorum since {max(0.0, now - replica.asked_at):.1f} s"
    if member:
        return "training", ""
    return "joining", replica.phase if replica.phase not in ("", "step") else "connected, not in a quorum"


def heal_words(heal: HealSeen) -> str:
    """How far it is."""
    if not heal.total:
        return "receives state"
    return f"{heal.bytes / 1e6:.1f} of {heal.total / 1e6:.1f} MB ({heal.bytes / heal.total:.0%})"


# ---------------------------------------------------------------- lists


def quorum_name(quorum_id: int) -> str:
    """A short name of a quorum: ids are large, and their first digits say when the lighthouse was started."""
    return f"{quorum_id:x}"[-6:] if quorum_id else ""


def _quorum(quorum: QuorumSeen) -> Model:
    return {
        "quorum": quorum_name(quorum.quorum_id),
        "at": round(quorum.at, 3),
        "ended_at": round(quorum.ended_at, 3),
        "members": len(quorum.members),
        "joined": _names(quorum.joined),
        "without": _names(quorum.without),
        "step": quorum.step,
        "reason": quorum.reason,
    }


def _names(names: Sequence[str]) -> list[str]:
    more = len(names) - NAMES_MAX
    return [*names[:NAMES_MAX], *([f"{more} more"] if more > 0 else [])]


def _heal(heal: HealSeen) -> Model:
    return {
        "id": heal.replica_id,
        "at": round(heal.at, 3),
        "ended_at": round(heal.ended_at, 3),
        "ok": heal.ok,
        "from_step": heal.from_step,
        "to_step": heal.to_step,
        "bytes": heal.bytes,
        "total": heal.total,
    }


def _story(notes: Iterable[Note]) -> list[Mapping[str, Any]]:
    told = ((note, sentence(note)) for note in notes)
    return [{"at": round(note.at, 3), "kind": note.kind, "text": text} for note, text in told if text]
