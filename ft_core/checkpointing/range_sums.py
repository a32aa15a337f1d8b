"""What is read of an offer to be sent: a range and its checksum, on few threads at a time.

Threads: any, several at once. Checksums run on at most two of them, so that the training thread keeps a core.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from ft_core.checkpointing.http.wire import Cut, Refusal
from ft_core.checkpointing.staging import COPY_S
from ft_core.checkpointing.tensor_bytes import checksum

if TYPE_CHECKING:
    from ft_core.checkpointing.offer import Offer
    from ft_core.checkpointing.staging import Reading, Staging

CHECKSUM_THREADS_MAX: Final = 2


class RangeSums:
    """Of all offers of one replica."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._slots = threading.BoundedSemaphore(CHECKSUM_THREADS_MAX)

    def of(self, offer: Offer, index: int) -> Reading:
        """A range that lies in host memory, until it is released. Raises `Cut`, OSError: the device cannot copy it."""
        reading = offer.reading(index, self.staging)
        try:
            if not reading.begin():
                raise OSError(f"no pinned memory was free within {COPY_S:g} s")
            reading.view()
        except RuntimeError as error:
            reading.release()
            raise OSError(f"the device could not copy: {error}") from error
        except BaseException:
            reading.release()
            raise
        return reading

    def sum(self, offer: Offer, index: int, view: memoryview) -> int:
        """The checksum of a range. Raises `Cut`, and `Refusal` for a relayed range that has changed."""
        if offer.live:
            return 0  # it may change before it is sent; the receiver compares later
        with self._slots:
            if offer.closed:
                raise Cut
            value = checksum(view)
        if offer.verified is not None and offer.verified[index] != value:
            raise Refusal(410, f"range {index} has changed here since it was received")
        return value

    def value(self, offer: Offer, index: int) -> int:
        """Read a range for its checksum only."""
        reading = self.of(offer, index)
        try:
            return self.sum(offer, index, reading.view())
        finally:
            reading.release()
