"""The lighthouse as a directory: how the ft-doctors of a job find each other where it runs on none of their hosts.

How it works. Each would hold a meeting, and announces where, by heartbeats in a room of the lighthouse that only
ft-doctor uses; each reads what the others announce. `choose` (pure) says where to go: where somebody goes already, else
to a host that the others know without asking, else, when all are there, to the first in order. Who has chosen announces
that, too, so that whoever comes later goes there.

Invariants: no job's room is touched; what is announced is withdrawn at the end, and without heartbeats forgotten after
seconds. Threads: "ft-doctor-directory" from start to close: it announces. `find` is called on the caller's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ft_core.certificates import Tls
from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.errors import FaultToleranceError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ROOM = "ft-doctor"
ANNOUNCE_S, LOOK_S = 1.0, 0.25
CALL_S = 2.0
LATE_S = 5.0
"""So much longer than --wait a meeting is open, for those who learn last where it is."""
GOING, KNOWN, OFFERED, COMES = "at", "first", "can", "comes"
"""Somebody goes there; others would go there without asking; it could be there; it could not, but this host comes."""
COLON = "~"
"""In place of a colon, which separates a replica's name from the rest."""


@dataclass(frozen=True, order=True)
class Entry:
    """One announcement."""

    kind: str
    host: str
    port: int

    def text(self) -> str:
        """As a replica_id."""
        return f"{self.kind} {self.host.replace(':', COLON)} {self.port}"

    @staticmethod
    def from_text(text: str) -> Entry | None:
        """None: it is something else."""
        parts = text.split(" ")
        if len(parts) != 3 or parts[0] not in (GOING, KNOWN, OFFERED, COMES) or not parts[2].isdecimal():
            return None
        return Entry(parts[0], parts[1].replace(COLON, ":"), int(parts[2]))


def choose(entries: Collection[Entry], expected: int, *, late: bool) -> Entry | None:
    """Where to go; None: wait for more.

    Args:
        entries: that are announced, with one's own.
        expected: how many hosts come.
        late: there is no time left to wait for them.
    """
    for kind in (GOING, KNOWN):
        if found := [entry for entry in entries if entry.kind == kind]:
            return min(found)
    offered = [entry for entry in entries if entry.kind == OFFERED]
    return min(offered or entries) if late or len(entries) >= expected else None


class Directory:
    """What is announced at one lighthouse.

    Args:
        address: of the lighthouse.
        env: of the job, with its token and certificates.
        own: what this host offers.
    """

    def __init__(self, address: str, env: Mapping[str, str], own: Entry) -> None:
        self._address, self._env = address, env
        self._client: LighthouseClient | None = None
        self._announced = [own]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._announce, name="ft-doctor-directory", daemon=True)

    def __repr__(self) -> str:
        return f"Directory({self._address}, {self._announced})"

    def start(self) -> None:
        """Announce. Raises FaultToleranceError if the lighthouse is not there, or refuses."""
        limit, token = timedelta(seconds=CALL_S), self._env.get("FT_TOKEN", "")
        self._client = LighthouseClient(self._address, limit, token=token, tls=Tls.from_env(self._env), room=ROOM)
        self._client.heartbeat(self._announced[0].text(), limit)
        self._thread.start()

    def find(self, expected: int, wait_s: float) -> tuple[str, int]:
        """Where the meeting is. Raises FaultToleranceError if the lighthouse goes away."""
        until = time.monotonic() + wait_s
        while True:
            chosen = choose(self._seen(), expected, late=time.monotonic() >= until)
            if chosen is not None:
                going = Entry(GOING, chosen.host, chosen.port)
                self._announced.append(going)
                self._beat(going)
                return chosen.host, chosen.port
            self._ended.wait(LOOK_S)

    def close(self) -> None:
        """Withdraw what was announced. Idempotent."""
        self._ended.set()
        if self._client is None:
            return
        if self._thread.ident is not None:
            self._thread.join(2 * CALL_S)
        with contextlib.suppress(FaultToleranceError):  # then it is forgotten after seconds
            for entry in self._announced:
                self._client.report_ended(entry.text(), timedelta(seconds=CALL_S))
        self._client.close()
        self._client = None

    def _seen(self) -> set[Entry]:
        assert self._client is not None
        rooms = self._client.status(timedelta(seconds=CALL_S)).rooms
        found = {
            Entry.from_text(replica.replica_id)
            for room in rooms if room.room == ROOM
            for replica in room.replicas if replica.life == "up"
        }  # fmt: skip
        return {entry for entry in found if entry is not None} | {self._announced[0]}

    def _beat(self, entry: Entry) -> None:
        assert self._client is not None
        self._client.heartbeat(entry.text(), timedelta(seconds=CALL_S))

    def _announce(self) -> None:
        while not self._ended.wait(ANNOUNCE_S):
            with contextlib.suppress(FaultToleranceError):  # `find` tells; a lighthouse that is back is told again
                for entry in tuple(self._announced):
                    self._beat(entry)
