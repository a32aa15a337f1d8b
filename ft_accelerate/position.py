"""`LoaderPosition`: where a prepared training loader is.

Threads: the training thread.
"""

from __future__ import annotations

from ft_core.loop.position import EPOCH, Position

__all__ = ["EPOCH", "LoaderPosition"]


class LoaderPosition(Position):
    """Where a loader is: the next batch to be handed out, and the epoch it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0
        """Epochs that the run is ahead of this replica's script."""
        self.trained = False
        """The loader has been read for training."""
        self.taken_over = False
        """It came with a peer's state, and nothing was opened there yet."""
