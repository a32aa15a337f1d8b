"""`Position`: where a replica is in its training data, as all replicas know it.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TypeVar

P = TypeVar("P", bound="Position")
EPOCH = 1 << 40
"""Batches that an epoch may have."""


class Position:
    """The next batch to be trained on, and the epoch that it belongs to. Both count from 0."""

    def __init__(self, epoch: int = 0, batch: int = 0) -> None:
        self.epoch = epoch
        self.batch = batch

    def __repr__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"

    @property
    def code(self) -> int:
        """The position as one number, which grows with progress."""
        return self.epoch * EPOCH + self.batch

    def moved_to(self: P, code: int) -> P:
        """Go to the position with that code. Returns itself."""
        self.epoch, self.batch = divmod(code, EPOCH)
        return self
