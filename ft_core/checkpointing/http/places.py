"""Places of a heal server: who is served, who waits, and who has to give one up. Pure; the clock is an argument.

A place is a thread that serves one connection. Receivers beyond that number wait in order, at the cost of a descriptor
each. One machine cannot have all places, and where machines differ in how many they have, the one with fewer comes
first. While somebody waits, a connection that takes less than `MIN_BYTES_S` has to go: it is idle, stalled or dripping.

Invariants: a guest is in exactly one of `served`, `waiting` and `parked`, or gone. Bounds: `PLACES_MAX` served,
`WAITING_MAX` waiting or parked; of one machine `PLACES_PER_PEER_MAX` and `WAITING_PER_PEER_MAX`.
Threads: the owner's lock; a guest's pace is written by the thread that serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

PLACES_MAX: Final = 32
PLACES_PER_PEER_MAX: Final = 24
WAITING_MAX: Final = 512
WAITING_PER_PEER_MAX: Final = 384
STALL_S: Final = 3.0
"""How long a transfer, or an idle connection, may be slow while others wait."""
SILENT_S: Final = 1.0
"""The same for a connection that has not sent a request yet."""
MIN_BYTES_S: Final = 256 << 10


class Pace(Protocol):
    """The pace of a peer: since when it is its turn (None: it is not), and how many bytes it took since."""

    began: float | None
    moved: int


@dataclass(slots=True, eq=False)
class Guest:
    """A connection to a heal server, served or waiting."""

    peer: str
    pace: Pace
    spoke: bool = False
    """It has sent a request that may be answered."""


class Places:
    """The places of one server."""

    def __init__(self) -> None:
        self.served: dict[Guest, None] = {}
        self.waiting: dict[Guest, None] = {}  # first come, first served; those that were parked go to the front
        self.parked: dict[Guest, None] = {}

    def __repr__(self) -> str:
        return f"Places({len(self.served)} served, {len(self.waiting)} waiting, {len(self.parked)} parked)"

    def arrive(self, guest: Guest) -> bool:
        """A new guest waits; False: there is no room even for that."""
        held = [g.peer for g in (*self.waiting, *self.parked)]
        if len(held) >= WAITING_MAX or held.count(guest.peer) >= WAITING_PER_PEER_MAX:
            return False
        self.waiting[guest] = None
        return True

    def park(self, guest: Guest) -> bool:
        """A served guest waits for something that is not there yet, and gives up its place; False: no room for that."""
        if guest not in self.served or len(self.waiting) + len(self.parked) >= WAITING_MAX:
            return False
        del self.served[guest]
        self.parked[guest] = None
        return True

    def unpark(self, guest: Guest) -> None:
        """What a guest waited for is there: it is next, because it has waited for its turn before."""
        del self.parked[guest]
        self.waiting = {guest: None, **self.waiting}

    def leave(self, guest: Guest) -> None:
        """A guest is gone; also if it never was here."""
        for held in (self.served, self.waiting, self.parked):
            held.pop(guest, None)

    def promote(self) -> list[Guest]:
        """Give the free places away; returns who got one."""
        promoted = []
        while self.waiting and len(self.served) < PLACES_MAX:
            counts: dict[str, int] = {}
            for guest in self.served:
                counts[guest.peer] = counts.get(guest.peer, 0) + 1
            chosen = min(self.waiting, key=lambda g: counts.get(g.peer, 0))  # the first of those with the fewest
            if counts.get(chosen.peer, 0) >= PLACES_PER_PEER_MAX:
                break
            del self.waiting[chosen]
            self.served[chosen] = None
            promoted.append(chosen)
        return promoted

    def overdue(self, now: float) -> list[Guest]:
        """Guests that have to give up their place, because others wait."""
        return [guest for guest in self.served if _too_slow(guest, now)] if self.waiting else []


def _too_slow(guest: Guest, now: float) -> bool:
    began, moved = guest.pace.began, guest.pace.moved
    if began is None:
        return False
    took = now - began
    return took >= (STALL_S if guest.spoke else SILENT_S) and moved < MIN_BYTES_S * took
