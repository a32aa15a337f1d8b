"""What the lighthouse keeps beside each room to perform what it decides: streams, waiting calls, timers.

Ownership: `room_host.Rooms` and `unary_calls.Calls`, on the server's one loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_core.rpc.stream_host import Caller

if TYPE_CHECKING:
    import asyncio

    from ft_core.protocol.lighthouse.events import Effect, Event
    from ft_core.protocol.lighthouse.room import Room
    from ft_core.protocol.types import Quorum


@dataclass
class Waiter:
    """A unary Quorum call."""

    seq: int
    done: asyncio.Future[Quorum]


@dataclass
class RoomShell:
    """One room, and what is needed to perform what it decides."""

    room: Room
    leases: dict[str, Lease] = field(default_factory=dict)
    waiters: dict[str, Waiter] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    timer_at: float = 0.0
    reason_timer: asyncio.TimerHandle | None = None
    decision: asyncio.Handle | None = None
    """Draws the consequences of what the room has taken."""
    decided_at: float = 0.0
    """When the last decision was made."""
    taken: list[Event] = field(default_factory=list)
    """What the room has taken since, in the order in which it came. (Reports of progress are not among it.)"""
    effects: list[Effect] = field(default_factory=list)
    """What followed at once, performed already."""
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    turbulent_until: float = 0.0
    said: str = ""
    """The last reason that was logged."""

    def stop(self) -> None:
        """Cancel its timers."""
        for timer in (self.timer, self.reason_timer, self.decision):
            if timer is not None:
                timer.cancel()
        self.timer = self.reason_timer = self.decision = None


@dataclass(eq=False)
class Lease(Caller):
    """One open lease stream; its name is the replica_id."""

    shell: RoomShell = field(kw_only=True)
    generation: int = field(kw_only=True)
    renewals: int = 0
    told: tuple[str, float] = ("", 0.0)
    """The last reason it was sent."""
