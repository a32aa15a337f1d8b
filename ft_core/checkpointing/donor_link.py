"""`DonorLink`: one way from a receiver to a donor, as `Fetch` uses it, over whatever carries it.

How it works. A link is opened, the manifest of the offer is asked for, and then items (ranges, or checksums of ranges)
are: up to `window` before the first is answered. Answers come in the order of the questions. What came counts only
once its answer has been read to the end: with it the donor confirms that the offer was open until all of it was read.

Errors: OSError where the network or the donor's process failed, `HealError` where what came is not of the protocol,
`Refused` where the donor answered that it will not serve this, `Busy` where it may later.

Threads: one worker owns a link; only `cut()`, which wakes it, may be called from others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ft_core.errors import HealError

if TYPE_CHECKING:
    from collections.abc import Callable


class Refused(HealError):
    """The donor answered, and will not serve this; asking it again is useless."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Untrusted(HealError):
    """The certificates or tokens of the two sides do not fit: no other attempt of this process would fare better."""


class Busy(HealError):
    """The donor has no room for one more; it may have after `retry_s`."""

    def __init__(self, retry_s: float) -> None:
        super().__init__("busy with other receivers")
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True)
class Item:
    """Work: receive range `first`, or (count > 0) compare the checksums of `count` ranges from `first` on."""

    first: int
    count: int = 0


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a donor answers first: the tag of its offer, the digest of its layout, and the manifest."""

    tag: str
    digest: str
    manifest: bytes | bytearray


class DonorLink(Protocol):
    """See the file's header."""

    @property
    def window(self) -> int:
        """How many items may be asked for before the first is answered."""
        ...

    @property
    def reopens(self) -> bool:
        """Whether a link that failed may be followed by another one to the same donor."""
        ...

    def open(self, connect_s: float, left_s: float) -> None:
        """Connect within `connect_s`; a donor that has no place yet may let the link wait for up to `left_s`."""
        ...

    def greet(self, wait_s: float, bytes_max: int) -> Greeting:
        """Ask for the manifest, for which the donor may wait so long; HealError if it is longer than believed."""
        ...

    def set_idle(self, idle_s: float) -> None:
        """From now on, give up after `idle_s` without a byte."""
        ...

    def ask(self, item: Item, target: memoryview | None) -> None:
        """Ask for an item; a range is received into `target`, from now on until its answer was read or `close`."""
        ...

    def sums(self, count: int) -> bytes | bytearray:
        """The next answer: `count` checksums, little-endian u64 each."""
        ...

    def range(self, target: memoryview) -> int:
        """The next answer: fills `target`, returns the checksum that the donor took of it."""
        ...

    def cut(self) -> None:
        """From any thread: wake the worker, whose calls then fail."""
        ...

    def close(self) -> None:
        """Let go; when it returns nothing of it writes into a target any more."""
        ...


@dataclass(frozen=True, slots=True)
class Links:
    """How donors are reached: what makes a link to an address, and how many a single donor is given."""

    to: Callable[[str], DonorLink]
    """Raises ConfigError for an address that is none."""
    with_one_donor: int = 1


def explain(error: Exception) -> str:
    """One clause for a log or an error message."""
    if isinstance(error, BlockingIOError):
        return "sent nothing for longer than idle_s"
    if isinstance(error, TimeoutError):
        return "could not be connected to in time"
    if isinstance(error, OSError):
        return error.strerror or str(error) or repr(error)
    return str(error) or repr(error)
