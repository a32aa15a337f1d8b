"""`Pair`: messages between one donor and one receiver over a process group, and what they are.

How it works. Each kind of message has a tag of its own, and messages of one tag arrive in the order they were sent, so
a receiver can have memory ready for many answers at once. A question is three numbers (`Ask`). The answer to MANIFEST
is a status with a length, then so many bytes; to RANGE and SUMS just the bytes, whose number the receiver knows. Every
answer ends with a *seal*: the donor's confirmation that its offer was open until all was read, and the checksum.

A pair owns its group, which it forms through the quorum's store and ends; or it borrows one that its user has formed
(`place` None), which it aborts if the transfer fails, as nobody knows any more which messages are still under way.

Errors: everything that the group raises becomes an OSError.

Threads: one owns the pair; `cut` comes from any.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import torch

from ft_core.errors import FaultToleranceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Work

    from ft_core.process_group import ProcessGroup

WINDOW: Final = 4
"""Questions in flight. A donor that has as many finishes the oldest; with fewer it waits for the next, or for FLUSH."""
SEAL: Final = 0x46544F4B
"""First number of a seal: 'FTOK'."""
OK: Final = 200
MIN_S: Final = 0.001
"""A group takes no timeout of zero, and one of no time at all for none."""


class Tag(IntEnum):
    """One per kind of message."""

    QUESTION = 0x7A31
    STATUS = 0x7A32
    BODY = 0x7A33
    SEAL = 0x7A34


class Ask(IntEnum):
    """First number of a question; the others are the first range, and how many."""

    MANIFEST = 1
    RANGE = 2
    SUMS = 3
    FLUSH = 4
    """No question comes before everything that was asked for has been answered."""
    BYE = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pair meets, and as whom."""

    store: str
    """host:port/prefix, used for this pair only."""
    replica_id: str
    rank: int


class Pair:
    """See the file's header. `peer`: the other's rank in `group`."""

    def __init__(self, group: ProcessGroup, peer: int, place: Place | None = None) -> None:
        self._group, self._peer, self._place = group, peer, place
        self._failed = False
        """A message may still be under way."""

    def __repr__(self) -> str:
        return f"Pair(with rank {self._peer} of {self._group!r})"

    def form(self, within_s: float) -> None:
        """Meet the other one."""
        place = self._place
        if place is None:
            return
        with self._errors():
            self._group.set_timeout(timedelta(seconds=max(MIN_S, within_s)))
            self._group.configure(place.store, place.replica_id, place.rank, 2)

    def send(self, tag: Tag, tensor: torch.Tensor) -> Work:
        """Begin to send; the tensor must stay until that has ended."""
        with self._errors():
            return self._group.send([tensor], self._peer, int(tag))

    def receive(self, tag: Tag, tensor: torch.Tensor) -> Work:
        """Begin to receive into a tensor."""
        with self._errors():
            return self._group.recv([tensor], self._peer, int(tag))

    def wait(self, work: Work, within_s: float) -> None:
        """Block until a message has gone, or has come."""
        with self._errors():
            work.wait(timedelta(seconds=max(MIN_S, within_s)))

    def tell(self, tag: Tag, *numbers: int) -> Work:
        """Begin to send numbers (64 bits, signed or not)."""
        return self.send(tag, torch.tensor([_signed(number) for number in numbers], dtype=torch.int64))

    def hear(self, tag: Tag, count: int, within_s: float) -> list[int]:
        """Block until as many numbers have come."""
        numbers = torch.zeros(count, dtype=torch.int64)
        self.wait(self.receive(tag, numbers), within_s)
        return [int(number) for number in numbers.tolist()]

    def cut(self) -> None:
        """From any thread: everything under way fails, here and at the other one."""
        self._failed = True
        if self._place is None:
            self._group.abort()
        else:
            self._group.shutdown()  # so that it cannot be formed later either

    def close(self) -> None:
        """Let go of the group."""
        if self._place is not None:
            self._group.shutdown()
        elif self._failed:
            self._group.abort()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (FaultToleranceError, RuntimeError) as error:
            self._failed = True
            raise OSError(str(error)) from error


def unsigned(number: int) -> int:
    """A checksum as it was before it was sent."""
    return number % (1 << 64)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
