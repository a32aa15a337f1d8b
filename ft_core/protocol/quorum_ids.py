"""R8: quorum ids that only ever grow, also across lighthouse restarts and clocks that go back. Pure.

An id packs boot (31 bits: seconds of the clock when the lighthouse started, or one more than any foreign boot seen),
16 random bits and a counter. The counter is per lighthouse, not per room.

An id is believed only as far as a clock can be wrong: one whose boot lies more than `MAX_AHEAD_S` after this
lighthouse's is refused before it is observed (`implausible`). Otherwise one client with a broken id would use up the 31
bits for every room. A checkpoint names such an id too (`Version.quorum_id`); it is refused where it is loaded.

Invariant: `next` is greater than every id handed out or observed before, and fits an int64.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

EPOCH_2020_S = 1_577_836_800
"""Boots count from 2020-01-01, so that 31 bits last until 2088."""
MAX_AHEAD_S = 1 << 30
"""34 years. Lighthouses without a clock of their own start in 1970 or 2020, beside others that have one."""
MAX_BOOT = (1 << 31) - 1


def boot_of(clock_s: float) -> int:
    """The boot of a lighthouse that starts at this wall-clock time (seconds since 1970)."""
    return max(1, int(clock_s) - EPOCH_2020_S)


def too_late(quorum_id: int, boot: int) -> str:
    """Why an id cannot have been made by any lighthouse, to one whose clock gives `boot`; '' if it can."""
    ahead_s = (quorum_id >> 32) - boot
    if ahead_s <= min(MAX_AHEAD_S, MAX_BOOT - 1 - boot):
        return ""
    return f"it would be of a lighthouse that starts {ahead_s / 31_557_600:.0f} years from now"


@dataclass(slots=True)
class QuorumIds:
    """R8: quorum_id = boot (31 bit) | random (16) | counter (16); one per lighthouse, shared by its rooms."""

    boot: int
    noise: int
    entropy: deque[int] = field(default_factory=deque)
    """Random 16-bit numbers handed in by the shell; one is used whenever the boot number moves."""
    counter: int = 0
    unique: bool = True
    """False only in the simulation that shows what happens without R8."""
    ours: set[int] = field(default_factory=set)
    """`boot | noise` pairs handed out by this lighthouse: an id that carries one of them is not foreign."""
    started: int = field(init=False)
    """The first boot: that of the clock."""

    def __post_init__(self) -> None:
        self.started = self.boot

    def take(self, **named: int) -> str:
        """Take note of ids that somebody presents, unless one is implausible: then the sentence that says so."""
        why = self.implausible(**named)
        if not why:
            for quorum_id in named.values():
                self.observe(quorum_id)
        return why

    def implausible(self, **named: int) -> str:
        """The sentence about the first of these ids that no lighthouse can have made; '' if all are believed."""
        for name, quorum_id in named.items():
            why = too_late(quorum_id, self.started)
            if why and (quorum_id >> 16) not in self.ours:
                return (
                    f"{name}={quorum_id} cannot be the id of a quorum: {why}. If it comes from a checkpoint, that is "
                    "damaged; else the clock of this lighthouse's machine is wrong: set it, and start the lighthouse "
                    "again"
                )
        return ""

    def knows(self, quorum_id: int) -> bool:
        """Whether the next id is certain to be greater than this one."""
        return not self.unique or (quorum_id >> 32) <= self.boot

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
