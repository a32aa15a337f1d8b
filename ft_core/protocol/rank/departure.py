"""How a rank is to end: it leaves, is drained, or all members stop. Pure.

Invariant: what is agreed never becomes open again. Ownership: as `rank`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Departure:
    """Which ends a rank wants, and which all know of."""

    leaving: bool = False
    """The next fence is this member's last, and says so (R16)."""
    drain_wanted: bool = False
    """This replica is to leave at the next boundary: told to the ranks of its group in the next vote."""
    drain_agreed: bool = False
    """A rank of this group is to: all of them leave at the next boundary (R12)."""
    stop_wanted: bool = False
    """In every fence from the next one on: all members are asked to stop training."""
    stop_agreed: bool = False

    def leave(self) -> None:
        """Say goodbye in the next fence."""
        self.leaving = True

    def want_drain(self) -> None:
        """Leave at the next boundary, with the other ranks of the group."""
        self.drain_wanted = True

    def want_stop(self) -> None:
        """Ask all members to stop training."""
        self.stop_wanted = True

    def settled(self, *, drain: bool, stop: bool) -> None:
        """What a verdict said."""
        self.drain_agreed |= drain
        self.stop_agreed |= stop
