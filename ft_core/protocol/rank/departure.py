"""How a rank is to end: it leaves, is drained, or all members stop. Pure.

Invariant: what is agreed never becomes open again. Ownership: as `rank`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.errors import FaultToleranceError


class DrainedError(FaultToleranceError):
    """No quorum was waited for, because this replica drains; never leaves the Manager."""


@dataclass(slots=True)
class Departure:
    """Which ends a rank wants, and which all know of."""

    leaving: bool = False
    """The next ballot is this member's last, and says so (R16)."""
    drain_reason: str = ""
    """Why this replica is to leave at the next boundary; the ranks of its group learn it with the next vote."""
    drain_agreed: bool = False
    """A rank of this group is to: all of them leave at the next boundary (R12)."""
    stop_wanted: bool = False
    """In every ballot from the next one on: all members are asked to stop training."""
    stop_agreed: bool = False

    @property
    def drain_wanted(self) -> bool:
        """This replica is to leave at the next boundary."""
        return bool(self.drain_reason)

    def settled(self, *, drain: bool, stop: bool) -> None:
        """What a verdict said."""
        self.drain_agreed |= drain
        self.stop_agreed |= stop
