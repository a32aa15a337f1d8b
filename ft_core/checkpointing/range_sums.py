"""What is read of an offer to be sent: a range and its checksum, on few threads at a time.

Threads: any, several at once. Checksums run on at most two of them, so that the training thread keeps a core.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from ft_core.checkpointing.http.wire import Cut, Refusal
from ft_core.checkpointing.tensor_bytes import checksum

if TYPE_CHECKING:
    from ft_core.checkpointing.offer import Offer

CHECKSUM_THREADS_MAX: Final = 2


class RangeSums:
    """Of all offers of one replica."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(CHECKSUM_THREADS_MAX)

    def of(self, offer: Offer, index: int) -> tuple[int, memoryview]:
        """Checksum and memory of a range. Raises `Cut`, and `Refusal` for a relayed range that has changed."""
        view = offer.view(index)
        if offer.live:
            return 0, view  # it may change before it is sent; the receiver compares later
        with self._slots:
            if offer.closed:
                raise Cut
            value = checksum(view)
        if offer.verified is not None and offer.verified[index] != value:
            raise Refusal(410, f"range {index} has changed here since it was received")
        return value, view
