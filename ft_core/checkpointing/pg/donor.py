"""The donor's end of a pair: answers the receiver's questions from an offer, several at once.

How it works. What a question asks for is read, summed up and begun to be sent at once; its seal follows when its bytes
have gone, after the offer was looked at under its lock: a seal proves that all was read before the offer was closed
(`offers`). Seals are sent when WINDOW questions are open, or on FLUSH, so that the next range is already on its way
while the receiver checks the one before.

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
    from collections.abc import Sequence

    from torch.distributed import Work

    from ft_core.checkpointing.offer import Offer
    from ft_core.checkpointing.offers import OfferBook
    from ft_core.checkpointing.pg.pair import Pair
    from ft_core.checkpointing.range_sums import RangeSums

BAD_QUESTION: Final = 400


@dataclass(slots=True)
class _Sent:
    """An answer whose bytes are on their way."""

    offer: Offer
    work: Work
    value: int
    """Its checksum."""


class PgDonor:
    """Serves the offer `tag` of a book to the other one of a pair."""

    def __init__(self, pair: Pair, book: OfferBook, sums: RangeSums, tag: str) -> None:
        self._pair, self._book, self._sums, self._tag = pair, book, sums, tag
        self._sent: deque[_Sent] = deque()
        self._told: deque[Work] = deque(maxlen=2 * WINDOW)
        self._idle_s = 0.0

    def serve(self, until: float, idle_s: float) -> None:
        """Answer until the receiver says goodbye. Raises OSError, `Cut`: it has gone, or the offer is closed.

        `until`: monotonic s. `idle_s`: how long the receiver may take for what is sent to it.
        """
        self._idle_s = idle_s
        while True:
            kind, first, count = self._pair.hear(Tag.QUESTION, 3, until - time.monotonic())
            if kind == Ask.BYE:
                return
            if kind == Ask.FLUSH:
                while self._sent:
                    self._seal()
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
        value, view = self._sums.of(offer, index)
        self._begin(offer, torch.frombuffer(view, dtype=torch.uint8), value)

    def _range_sums(self, first: int, count: int) -> None:
        offer = self._find()
        self._check(offer, first, count)
        values = [self._sums.of(offer, index)[0] for index in range(first, first + count)]
        body = torch.tensor([value - (1 << 64) if value >= 1 << 63 else value for value in values], dtype=torch.int64)
        self._begin(offer, body, checksum(bytes(_raw(values))))

    def _check(self, offer: Offer, first: int, count: int) -> None:
        if not 0 <= first < first + count <= len(offer.ranges):
            raise OSError(f"the receiver asked for ranges {first}+{count} of {len(offer.ranges)}")
        if not all(offer.intact(index) for index in range(first, first + count)):
            raise Cut

    def _begin(self, offer: Offer, body: torch.Tensor, value: int) -> None:
        self._sent.append(_Sent(offer, self._pair.send(Tag.BODY, body), value))
        if len(self._sent) >= WINDOW:
            self._seal()

    def _seal(self) -> None:
        """Finish the oldest answer."""
        sent = self._sent[0]
        self._pair.wait(sent.work, self._idle_s)
        self._book.confirm(sent.offer)
        self._told.append(self._pair.tell(Tag.SEAL, SEAL, sent.value))
        self._sent.popleft()


def _raw(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)
