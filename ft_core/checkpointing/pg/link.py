"""`PgLink`: the receiver's end of a pair, a `DonorLink`: memory is ready before what goes there is asked for.

How it works. `ask` begins to receive a range into the memory it belongs to, and its seal, and then sends the question;
so several ranges travel while one is checked, and nothing is copied on the way. When fewer questions are open than a
donor waits for, FLUSH asks it to finish them.

Waiting is done for the seal, which comes behind its body. If the connection ends while a body is coming in, Gloo may
lose that receive: who waits for it waits until its timeout, though nothing can come. The seal fails at once.

Invariant: `close` returns when nothing is received any more: the group has ended, and of everything begun on it either
Gloo said that it has ended, or the wait for it timed out, by which Gloo closes the group's connections under their
locks.

Threads: as `DonorLink`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from ft_core.checkpointing.donor_link import Greeting, Item, Refused
from ft_core.checkpointing.pg.pair import OK, SEAL, WINDOW, Ask, Tag, unsigned
from ft_core.checkpointing.tensor_bytes import byte_view, checksum
from ft_core.errors import HealError

if TYPE_CHECKING:
    from torch.distributed import Work

    from ft_core.checkpointing.pg.pair import Pair

DIGEST_BYTES: Final = 32
"""Length of a layout's digest, which precedes a manifest."""
REFUSAL_BYTES_MAX: Final = 1 << 14
BYE_S: Final = 1.0
"""Longest a donor is told goodbye; it notices the end of the connection as well."""
END_S: Final = 0.1
"""How long a body whose seal has come, or what was begun on a group that has ended, may take to end; Gloo needs a
millisecond."""


@dataclass(slots=True)
class _Answer:
    """What was asked for and has not been read yet."""

    body: torch.Tensor
    seal: torch.Tensor
    works: deque[Work]
    """What has not been waited for: first the seal, then the body. Waiting twice for one, Gloo waits for ever."""


class PgLink:
    """See the file's header."""

    window: Final = WINDOW
    reopens: Final = False  # the donor forms each pair once

    def __init__(self, pair: Pair, tag: str) -> None:
        self._pair, self._tag = pair, tag
        self._idle_s = BYE_S
        self._open: deque[_Answer] = deque()
        self._sends: deque[Work] = deque(maxlen=2 * WINDOW)
        self._flushed = True

    def open(self, connect_s: float, left_s: float) -> None:
        """Form the group. The donor comes when it has been told of the quorum, too."""
        del connect_s
        self._pair.form(left_s)
        self._idle_s = left_s

    def greet(self, wait_s: float, bytes_max: int) -> Greeting:
        """Ask for the manifest."""
        self._ask(Ask.MANIFEST)
        status, length = self._pair.hear(Tag.STATUS, 2, wait_s)
        limit = bytes_max + DIGEST_BYTES if status == OK else REFUSAL_BYTES_MAX
        if not 0 <= length <= limit:
            raise HealError(f"the answer has {length} bytes, the limit is {limit}")
        answer = self._receive(torch.zeros(length, dtype=torch.uint8))
        self._wait(answer, wait_s)
        data = _bytes(answer.body)
        self._check_seal(answer.seal.tolist(), checksum(data))
        if status != OK:
            raise Refused(status, f"{status}: {data.decode('utf-8', 'replace').strip()}")
        return Greeting(self._tag, data[:DIGEST_BYTES].decode("ascii", "replace"), data[DIGEST_BYTES:])

    def set_idle(self, idle_s: float) -> None:
        """From now on, give up after so long without an answer."""
        self._idle_s = idle_s

    def ask(self, item: Item, target: memoryview | None) -> None:
        """Begin to receive, then ask."""
        body = (
            torch.zeros(item.count, dtype=torch.int64)
            if target is None
            else torch.frombuffer(target, dtype=torch.uint8)
        )
        self._receive(body)
        self._ask(Ask.SUMS if item.count else Ask.RANGE, item.first, item.count)
        self._flushed = False

    def sums(self, count: int) -> bytes:
        """Wait for checksums."""
        answer = self._answer()
        data = _bytes(answer.body.view(torch.uint8))
        self._check_seal(answer.seal.tolist(), checksum(data))
        if len(data) != 8 * count:
            raise HealError(f"{count} checksums came as {len(data)} bytes")
        return data

    def range(self, target: memoryview) -> int:
        """Wait for a range; it lies in `target` since."""
        del target
        return self._check_seal(self._answer().seal.tolist())

    def _receive(self, body: torch.Tensor) -> _Answer:
        answer = _Answer(body, torch.zeros(2, dtype=torch.int64), deque())
        self._open.append(answer)
        for tag, tensor in ((Tag.BODY, body), (Tag.SEAL, answer.seal)):
            if tensor.numel():
                answer.works.appendleft(self._pair.receive(tag, tensor))
        return answer

    def _wait(self, answer: _Answer, seal_s: float) -> None:
        """Until an answer, the oldest, is here."""
        self._pair.wait(answer.works.popleft(), seal_s)
        while answer.works:
            self._pair.wait(answer.works.popleft(), END_S)
        self._open.popleft()

    def _answer(self) -> _Answer:
        if len(self._open) < self.window and not self._flushed:
            self._ask(Ask.FLUSH)
            self._flushed = True
        answer = self._open[0]
        self._wait(answer, self._idle_s)
        return answer

    def _ask(self, what: Ask, first: int = 0, count: int = 0) -> None:
        self._sends.append(self._pair.tell(Tag.QUESTION, what, first, count))

    def _check_seal(self, seal: list[int], expected: int | None = None) -> int:
        magic, value = seal[0], unsigned(seal[1])
        if magic != SEAL:
            raise HealError("the answer does not end as the protocol says")
        if expected is not None and value != expected:
            raise HealError("the checksum of an answer does not match")
        return value

    def cut(self) -> None:
        """End the group."""
        self._pair.cut()

    def close(self) -> None:
        """Say goodbye if nothing is under way, and end it."""
        if not self._open:
            with contextlib.suppress(OSError):
                self._pair.wait(self._pair.tell(Tag.QUESTION, Ask.BYE, 0, 0), BYE_S)
        else:
            self._pair.cut()
        for answer in self._open:
            for work in answer.works:
                with contextlib.suppress(OSError):
                    self._pair.wait(work, END_S)
        self._open.clear()
        self._pair.close()


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor))
