"""The place an epoch has reached: which positions committed steps took. Pure values; part of the state that heals.

An epoch is the positions 0 ... length - 1 of an `epoch_order.EpochOrder`. Steps take them in order, so nearly always
one number is enough: all positions below `taken` are in committed steps. What a committed step was to contain but
did not (a participant whose heal failed gave zeros, because it never vetoes, R11) is *returned*: those ranges are
handed out first in the next step.

Invariants: `returned` is sorted, its ranges are disjoint, not empty, do not touch each other and lie below `taken`; a
complete epoch is never stored, it is the beginning of the next one. So equal cursors mean equal histories of an epoch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Cursor", "Ranges", "merged", "part", "size_of"]

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of positions, none of them empty, in the order in which they are handed out."""


def size_of(ranges: Ranges) -> int:
    """Number of positions."""
    return sum(stop - start for start, stop in ranges)


def part(ranges: Ranges, first: int, last: int) -> Ranges:
    """The positions number `first` (inclusive) to `last` (exclusive) of some ranges."""
    out = []
    for start, stop in ranges:
        low, high = max(start, start + first), min(stop, start + last)
        if low < high:
            out.append((low, high))
        first, last = first - (stop - start), last - (stop - start)
        if last <= 0:
            break
    return tuple(out)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same positions, sorted, with neighbours joined."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a run in its data."""

    length: int
    """Samples in one epoch, at least 1."""
    epoch: int = 0
    taken: int = 0
    returned: Ranges = ()
    steps: int = 0
    """Committed steps of this epoch so far."""

    @property
    def left(self) -> int:
        """Positions of this epoch that no committed step contains; at least 1."""
        left = self.length - self.taken
        return left + size_of(self.returned) if self.returned else left

    @property
    def sound(self) -> bool:
        """The invariants hold."""
        edges = [edge for pair in self.returned for edge in pair]
        inside = 0 <= self.taken <= self.length and (not edges or (edges[0] >= 0 and edges[-1] <= self.taken))
        rising = all(a < b for a, b in itertools.pairwise(edges))
        return self.length >= 1 and self.epoch >= 0 and self.steps >= 0 and inside and rising and self.left >= 1

    def ahead(self, count: int) -> Ranges:
        """The next `count` positions, or all that are left: what was returned first."""
        if not self.returned:  # nearly always: this runs several times per batch
            start, stop = self.taken, min(self.length, self.taken + count)
            return ((start, stop),) if stop > start else ()
        back = part(self.returned, 0, count)
        fresh = min(self.length, self.taken + count - size_of(back))
        return merged(back) + (((self.taken, fresh),) if fresh > self.taken else ())

    def after(self, count: int, missing: Ranges = ()) -> Cursor:
        """The cursor once a step of the next `count` positions, all except `missing`, was committed."""
        if not self.returned and not missing:
            if self.taken + count >= self.length:
                return self.at_epoch(self.epoch + 1)
            return Cursor(self.length, self.epoch, self.taken + count, (), self.steps + 1)
        back = size_of(part(self.returned, 0, count))
        taken = min(self.length, self.taken + count - back)
        kept = part(self.returned, back, size_of(self.returned))
        returned = merged((*kept, *missing))
        if taken == self.length and not returned:
            return self.at_epoch(self.epoch + 1)
        return Cursor(self.length, self.epoch, taken, returned, self.steps + 1)

    def at_epoch(self, epoch: int) -> Cursor:
        """The beginning of an epoch."""
        return Cursor(self.length, epoch)
