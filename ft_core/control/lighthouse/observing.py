"""What the dashboard is told of the rooms: samples, and what happened in between. Decides nothing.

How it works. `Tee` stands where the rooms write their events: it hands them on to the log, and keeps the last NOTES_MAX
until the next sample. `RoomsSource` takes a sample on the lighthouse's loop when it is asked for one: it copies a few
fields of each record, two microseconds each, and nothing is put together there.

Invariants: what is kept is bounded by NOTES_MAX. Threads: all on the lighthouse's loop, but `sample` and `order`, which
any thread may call and which return at once.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ft_core.control.lighthouse.orders import send_order
from ft_core.dashboard.sample import Note, ReplicaSample, RoomSample, Sample
from ft_core.protocol.lighthouse.view import Life
from ft_core.rpc.channel import release

if TYPE_CHECKING:
    import concurrent.futures

    from ft_core.control.lighthouse.room_host import Rooms
    from ft_core.control.lighthouse.room_shell import RoomShell
    from ft_core.events.event_log import Events
    from ft_core.rpc.loop_server import LoopServer

NOTES_MAX = 1024
"""Notes between two samples; of more, the last."""
GONE_S = 600.0
"""For so long a replica is shown that has ended."""
SHOWN = (
    "quorum_formed",
    "quorum_ended",
    "member_lost",
    "goodbye",
    "no_quorum_yet",
    "refused",
    "lease_opened",
    "stood_still",
    "pair",
)
"""Kinds of events that the dashboard shows."""


class Tee:
    """Events on their way to the log, looked at."""

    on = True

    def __init__(self, log: Events) -> None:
        self._log = log
        self._notes: deque[Note] = deque(maxlen=NOTES_MAX)

    def __repr__(self) -> str:
        return f"Tee({self._log!r}, {len(self._notes)} notes)"

    def emit(self, kind: str, /, **fields: Any) -> None:
        """As `Events.emit`."""
        if self._log.on:
            self._log.emit(kind, **fields)
        if kind in SHOWN:
            self.note(kind, fields)

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """For the dashboard only."""
        self._notes.append(Note(time.time(), kind, fields))

    def take(self) -> tuple[Note, ...]:
        """The notes since the last call."""
        notes = tuple(self._notes)
        self._notes.clear()
        return notes

    def close(self) -> None:
        """As `Events.close`."""
        self._log.close()


class RoomsSource:
    """The rooms of one lighthouse, as the dashboard sees them."""

    def __init__(self, rooms: Rooms, tee: Tee, server: LoopServer) -> None:
        self._rooms, self._tee, self._server = rooms, tee, server

    def __repr__(self) -> str:
        return f"RoomsSource({self._rooms!r})"

    def sample(self) -> concurrent.futures.Future[Sample]:
        """As `dashboard.server.Source.sample`."""
        return self._server.submit(lambda: take_sample(self._rooms, self._tee))

    def order(self, *, kill: bool, room: str, replica: str, reason: str) -> concurrent.futures.Future[list[str]]:
        """As `dashboard.server.Source.order`."""
        return self._server.submit(lambda: self._order(kill, room, replica, reason))

    def _order(self, kill: bool, room: str, replica: str, reason: str) -> list[str]:
        told = send_order(self._rooms, room, replica, reason, kill=kill)
        for replica_id in told:
            what = "exit at once" if kill else "drain"
            self._tee.note("order", {"room": room, "replica_id": replica_id, "what": what, "reason": reason})
        return told


def take_sample(rooms: Rooms, tee: Tee) -> Sample:
    """All rooms as they are. On the lighthouse's loop."""
    now, partner = rooms.now(), rooms.partner
    return Sample(
        at=now, started=rooms.started, liveness_s=rooms.liveness_s, release=release(),
        rooms=[_room(shell, now) for shell in rooms.chosen("")], notes=tee.take(),
        pair=partner.standing if partner is not None else None,
    )  # fmt: skip


def _room(shell: RoomShell, now: float) -> RoomSample:
    room, leases = shell.room, shell.leases
    current = room.current
    replicas = []
    for replica_id, record in room.records.items():
        if record.life is Life.GONE and now - record.since > GONE_S:
            continue
        lease, hello = leases.get(replica_id), record.hello
        replicas.append(
            ReplicaSample(
                replica_id, hello.name, record.life.value, record.since, max(record.step, 0), record.phase,
                record.ask is not None, record.asked_at, record.paused_until, record.stable, record.stalled,
                record.incomplete, lease.stream.silence_s if lease is not None else -1.0, hello.release,
                hello.group_world_size, hello.heal_addresses, record.healed,
            )
        )  # fmt: skip
    return RoomSample(
        name=room.name, quorum_id=current.quorum_id if current is not None else 0,
        members=current.members if current is not None else (), ended=current is None or current.ended,
        formed=room.last_quorum, reason=room.waits.reason, held=room.waits.held, closed=room.closed,
        given_up=dict(room.expected.given_up), replicas=replicas,
    )  # fmt: skip
