"""The rooms that a lighthouse may forget when another one is needed, and what it remembers of them. Pure.

How it works. A room is made by the first message that names it; many jobs and runs may share one lighthouse, so the
rooms of those that are over have to make place. `replaceable` names the room that is missed least: one without any
lease, of which nothing is left (every replica certainly gone, training finished, or no quorum ever formed), the oldest
first; else one whose replicas have all been out of reach for longer than a living client takes to come back. Such a
replica presents its quorum when it returns all the same, as it would to a lighthouse that was restarted.

That training has finished is remembered longer than the room (R16: who comes late must not train again over the
checkpoints): `FinishedRooms` holds the last MAX_FINISHED of these.

Invariant: a room with a lease, or in which anybody asks, is never forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.types import VOID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.lighthouse.room import Room
    from ft_core.protocol.types import Version

MAX_ROOMS = 256
"""Rooms with living replicas that one lighthouse serves."""
MAX_FINISHED = 4096


class FinishedRooms:
    """The rooms whose training has finished, after they have made place for others."""

    def __init__(self) -> None:
        self._rooms: dict[str, tuple[str, Version]] = {}

    def __repr__(self) -> str:
        return f"FinishedRooms({len(self._rooms)})"

    def remember(self, room: Room) -> None:
        """A room is about to be forgotten."""
        if not room.closed:
            return
        if room.name not in self._rooms and len(self._rooms) >= MAX_FINISHED:
            del self._rooms[next(iter(self._rooms))]
        self._rooms[room.name] = (room.closed, room.finished)

    def take(self, name: str) -> tuple[str, Version]:
        """Why the room of this name, which is about to be made anew, is closed, and at which state; '': it is not."""
        return self._rooms.pop(name, ("", VOID))


def replaceable(rooms: Mapping[str, Room], now: float, absence_s: float) -> str:
    """Pick the one of `rooms` to forget; '': all are needed.

    Args:
        rooms: those in which nobody has a lease.
        now: instant, by the clock of the rooms.
        absence_s: how long a living client may take to open its lease again.
    """
    found: list[tuple[bool, float, str]] = []
    for name, room in rooms.items():
        records = room.records.values()
        if any(record.life is Life.UP or record.ask is not None for record in records):
            continue
        since = max((record.since for record in records), default=0.0)
        over = bool(room.closed) or all(record.life is Life.GONE for record in records)
        over = over or (room.current is None and not room.expected.trained)
        if over or now - since > absence_s:
            found.append((not over, since, name))
    return min(found, default=(False, 0.0, ""))[2]
