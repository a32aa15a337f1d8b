"""What a lighthouse looks up when somebody asks for its metrics: its role in a pair, members, leases and their ages.

How it works. `look` asks the server's loop for a picture, and keeps it for FRESH_S: however many ask, the loop makes
one in that time, in one turn, and none while nobody asks. If the loop is busy for longer than PATIENCE_S the last
picture has to do.

Invariants: rooms are read on the loop only. Threads: `look` from any, the loop's own included.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ft_core.events.schema import PAIR_ROLES
from ft_core.metrics.tally import Change, Put
from ft_core.protocol.lighthouse.view import Life

if TYPE_CHECKING:
    from ft_core.control.lighthouse.room_host import Rooms
    from ft_core.control.lighthouse.room_shell import RoomShell
    from ft_core.dashboard.sample import PairSample
    from ft_core.rpc.loop_server import LoopServer

FRESH_S = 1.0
PATIENCE_S = 0.5


class RoomSamples:
    """The last picture of the rooms of one lighthouse.

    Args:
        rooms: returns them, once there are any.
        server: on whose loop they are.
    """

    def __init__(self, rooms: Callable[[], Rooms], server: LoopServer) -> None:
        self._rooms, self._server = rooms, server
        self._lock = threading.Lock()
        self._taken_at = float("-inf")
        self._picture: tuple[Change, ...] = ()

    def __repr__(self) -> str:
        return f"RoomSamples({len(self._picture)} values)"

    def look(self) -> Iterable[Change]:
        """The rooms as they were at most FRESH_S ago, if the loop is not busy."""
        if self._server.on_loop():
            return self._take()
        with self._lock:
            if time.monotonic() - self._taken_at >= FRESH_S:
                try:
                    self._picture = self._server.call(self._take, PATIENCE_S)
                    self._taken_at = time.monotonic()
                except (RuntimeError, TimeoutError, concurrent.futures.TimeoutError):
                    pass  # it ends, or is busy
            return self._picture

    def _take(self) -> tuple[Change, ...]:
        """On the loop."""
        rooms = self._rooms()
        pair = () if rooms.partner is None else _of_pair(rooms.partner.standing)
        return (*pair, *(change for shell in rooms.chosen("") for change in _of(shell)))


def _of_pair(standing: PairSample) -> Iterable[Change]:
    for role in PAIR_ROLES:
        yield Put("ft_lighthouse_role", float(role == standing.role), (role,))
    yield Put("ft_lighthouse_contact", float(standing.contact))


def _of(shell: RoomShell) -> Iterable[Change]:
    room, name = shell.room, (shell.room.name,)
    current, records = room.current, room.records
    alive = [record for record in records.values() if record.life is Life.UP]
    yield Put("ft_lighthouse_members", len(current.members) if current is not None and not current.ended else 0, name)
    yield Put("ft_lighthouse_replicas", len(shell.leases), name)
    yield Put("ft_lighthouse_waiting", sum(record.ask is not None for record in alive), name)
    yield Put("ft_lighthouse_stalled", sum(bool(record.stalled) for record in alive), name)
    yield Put("ft_lighthouse_step", max((record.step for record in records.values()), default=0), name)
    ages: dict[str, float] = {}
    for replica_id, lease in shell.leases.items():
        if (record := records.get(replica_id)) is not None:
            age_s = lease.stream.silence_s
            ages[record.hello.name] = min(age_s, ages.get(record.hello.name, age_s))
    for replica, age_s in ages.items():
        yield Put("ft_lighthouse_lease_age_seconds", max(0.0, age_s), (room.name, replica))
