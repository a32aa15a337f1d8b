"""`Position`: where a training loader is, as all replicas know it.

Threads: the training thread.
"""

from __future__ import annotations

EPOCH = 1 << 32
"""Batches that an epoch may have."""


class Position:
    """Where a loader is: the next batch to be handed out, and the epoch it belongs to."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self.ahead = 0
        """Epochs that the run is ahead of this replica's script."""
        self.trained = False
        """The loader has been read for training."""
        self.taken_over = False
        """It came with a peer's state, and nothing was opened there yet."""

    def __repr__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"

    @property
    def code(self) -> int:
        """The position as one number, which grows with progress."""
        return self.epoch * EPOCH + self.batch

    def moved_to(self, code: int) -> Position:
        """Go to the position with that code. Returns itself."""
        self.epoch, self.batch = divmod(code, EPOCH)
        return self
