"""The donor's end of a pair: answers the receiver's questions from an offer, several at once.

How it works. What a question asks for is read, summed up and begun to be sent at once; its seal follows when its bytes
have gone, after the offer was looked at under its lock: a seal proves that all was read before the offer was closed
(`offers`). Seals are sent when WINDOW questions are open, or on FLUSH, so that the next range is already on its way
while the receiver checks the one before. Of ranges on a device two are under way at most, one being copied to pinned
memory while the other is sent: so many buffers a pair may hold.

Threads: one per pair serves; `Pair.cut` from any ends it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from ft_core.checkpointing.http.wire import Cut, NotYet, Refusal
from ft_core.checkpointing.pg.pair import OK, SEAL, WINDOW, Ask, Tag
from ft_core.checkpointing.tensor_bytes import checksum

if TYPE_CHECKING:
    from torch.distributed import Work

    from ft_core.checkpointing.offer import Offer
    from ft_core.checkpointing.offers import OfferBook
    from ft_core.checkpointing.pg.pair import Pair
    from ft_core.checkpointing.range_sums import RangeSums
    from ft_core.checkpointing.staging import Reading

BAD_QUESTION: Final = 400


@dataclass(slots=True)
class _Answer:
    """What was asked for and has not been sealed: read first (`work` None), then sent."""

    offer: Offer
    index: int
    reading: Reading | None
    """None: checksums, which are in no range's memory."""
    work: Work | None = None
    value: int = 0
    """Its checksum."""


class PgDonor:
    """Serves the offer `tag` of a book to the other one of a pair."""

    def __init__(self, pair: Pair, book: OfferBook, sums: RangeSums, tag: str) -> None:
        self._pair, self._book, self._sums, self._tag = pair, book, sums, tag
        self._open: deque[_Answer] = deque()  # at most WINDOW, oldest first; only the newest may not be sent yet
        self._told: deque[Work] = deque(maxlen=2 * WINDOW)
        self._idle_s = 0.0

    def serve(self, until: float, idle_s: float) -> None:
        """Answer until the receiver says goodbye. Raises OSError, `Cut`: it has gone, or the offer is closed.

        `until`: monotonic s. `idle_s`: how long the receiver may take for what is sent to it.
        """
        self._idle_s = idle_s
        try:
            self._serve(until)
        finally:
            for answer in self._open:
                if answer.reading is not None:
                    answer.reading.release()

    def _serve(self, until: float) -> None:
        while True:
            kind, first, count = self._pair.hear(Tag.QUESTION, 3, until - time.monotonic())
            if kind == Ask.BYE:
                return
            if kind == Ask.FLUSH:
                self._seal_down_to(0)
            elif kind == Ask.MANIFEST:
                self._manifest()
            elif kind == Ask.RANGE:
                self._range(first)
            elif kind == Ask.SUMS:
                self._range_sums(first, count)
            else:
                raise OSError(f"the receiver asked for {kind}, which is no question")

    def _find(self) -> Offer:
        try:
            return self._book.find(self._tag)
        except (Refusal, NotYet) as error:
            raise Cut from error  # it was open when the manifest was sent

    def _manifest(self) -> None:
        try:
            offer = self._book.find(self._tag)
        except Refusal as refusal:
            body = str(refusal).encode("utf-8", "replace")
            self._pair.wait(self._pair.tell(Tag.STATUS, refusal.status, len(body)), self._idle_s)
            self._send_bytes(body)
            self._told.append(self._pair.tell(Tag.SEAL, SEAL, checksum(body)))
            return
        body = offer.digest.encode("ascii") + offer.manifest()
        self._told.append(self._pair.tell(Tag.STATUS, OK, len(body)))
        self._send_bytes(body)
        self._book.confirm(offer)
        self._told.append(self._pair.tell(Tag.SEAL, SEAL, checksum(body)))

    def _send_bytes(self, body: bytes) -> None:
        if body:
            self._pair.wait(
                self._pair.send(Tag.BODY, torch.frombuffer(bytearray(body), dtype=torch.uint8)), self._idle_s
            )

    def _range(self, index: int) -> None:
        offer = self._find()
        self._check(offer, index, 1)
        reading = offer.reading(index, self._sums.staging)
        if reading.copied:
            self._seal_down_to(1)
        answer = _Answer(offer, index, reading)
        try:
            if not reading.begin(self._idle_s):
                raise OSError(f"no pinned memory was free within {self._idle_s:g} s (FT_STAGING_MB)")
        except RuntimeError as error:
            raise OSError(f"the device could not copy: {error}") from error
        self._open.append(answer)
        if not reading.copied:
            self._send(answer)
        else:  # while this one is being copied, the one before is sent
            for earlier in list(self._open)[:-1]:
                self._send(earlier)
        self._seal_down_to(WINDOW - 1)

    def _range_sums(self, first: int, count: int) -> None:
        offer = self._find()
        self._check(offer, first, count)
        values = [self._sums.value(offer, index) for index in range(first, first + count)]
        data = b"".join(value.to_bytes(8, "little") for value in values)
        answer = _Answer(offer, first, None, value=checksum(data))
        for earlier in self._open:
            self._send(earlier)
        answer.work = self._pair.send(Tag.BODY, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._open.append(answer)
        self._seal_down_to(WINDOW - 1)

    def _send(self, answer: _Answer) -> None:
        """Begin to send a range, once it is in host memory."""
        if answer.work is None:
            assert answer.reading is not None
            view = answer.reading.view()
            answer.value = self._sums.sum(answer.offer, answer.index, view)
            answer.work = self._pair.send(Tag.BODY, torch.frombuffer(view, dtype=torch.uint8))

    def _seal_down_to(self, left: int) -> None:
        """Finish the oldest answers until so many are left."""
        while len(self._open) > left:
            answer = self._open[0]
            self._send(answer)
            assert answer.work is not None
            self._pair.wait(answer.work, self._idle_s)
            if answer.reading is not None:
                answer.reading.release()
            self._seal(answer)
            self._open.popleft()

    def _seal(self, answer: _Answer) -> None:
        self._book.confirm(answer.offer)
        self._told.append(self._pair.tell(Tag.SEAL, SEAL, answer.value))

    def _check(self, offer: Offer, first: int, count: int) -> None:
        if not 0 <= first < first + count <= len(offer.ranges):
            raise OSError(f"the receiver asked for ranges {first}+{count} of {len(offer.ranges)}")
        if not all(offer.intact(index) for index in range(first, first + count)):
            raise Cut
