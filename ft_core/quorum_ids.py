"""R8: quorum ids that only ever grow, also across lighthouse restarts and clocks that go back. Pure.

An id packs boot (31 bits: seconds of the clock when the lighthouse started, or one more than any foreign boot seen),
16 random bits and a counter. The counter is per lighthouse, not per room.

Invariant: `next` is greater than every id handed out or observed before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ft_core.quorum import Ask, Current, Quorum
    from ft_core.room_record import Record


@dataclass(slots=True)
class QuorumIds:
    """R8: quorum_id = boot (31 bit) | random (16) | counter (16); one per lighthouse, shared by its rooms."""

    boot: int
    noise: int
    entropy: deque[int] = field(default_factory=deque)
    """Random 16-bit numbers handed in by the shell; one is used whenever the boot epoch moves."""
    counter: int = 0
    unique: bool = True
    """False only in the simulation that shows what happens without R8."""
    ours: set[int] = field(default_factory=set)
    """`boot | noise` pairs handed out by this lighthouse: an id that carries one of them is not foreign."""

    def next(self) -> int:
        """The next id. Greater than every id handed out or observed before."""
        if self.counter >= 0xFFFF:
            self._move(self.boot + 1)
        self.counter += 1
        self.ours.add((self.boot << 16) | self.noise)
        return (self.boot << 32) | (self.noise << 16) | self.counter

    def observe(self, quorum_id: int) -> None:
        """Take note of an id somebody presents: if another lighthouse made it, stay above it for ever."""
        boot = quorum_id >> 32
        if self.unique and boot >= self.boot and (quorum_id >> 16) not in self.ours:
            self._move(boot + 1)

    def _move(self, boot: int) -> None:
        self.boot = boot
        self.noise = self.entropy.popleft() if self.entropy else (self.noise * 40503 + 1) & 0xFFFF
        self.counter = 0


def keeps_id(
    previous: Quorum | None, current: Current | None, asks: Sequence[Ask], records: Mapping[str, Record]
) -> bool:
    """Clients of the unary calls ask every step: the id stays while the members do and nobody reports a failure."""
    return (
        previous is not None
        and current is not None
        and current.quorum_id == previous.quorum_id
        and previous.ids == tuple(ask.replica_id for ask in asks)
        and all(not records[ask.replica_id].hello.leased and ask.commit_failures == 0 for ask in asks)
    )
