"""Elastic data in the simulation: a real cursor per rank, and the truth about which samples are in its state.

`Samples` is part of a rank's state: it heals with it. `taken` are the samples of the epoch whose gradients really went
into that state through this rank's ring, as a bitmap; what the cursor says about the same state must be their union
over the rings, at every commit (DESIGN 4.8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ft_core.data.cursor import Cursor
from ft_core.data.step_division import Batching, StepPlan
from ft_core.protocol.rank.commit_rule import contributed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

LENGTH = 23
"""Samples of an epoch: no multiple of a step's, so shares are uneven, and at its end some are empty."""
BATCHING = Batching(batch_size=2)
START = Cursor(LENGTH)


@dataclass(frozen=True, slots=True)
class Samples:
    """The data part of one rank's state."""

    cursor: Cursor = START
    taken: int = 0
    """Of the cursor's epoch, through this rank's ring."""

    def share(self, reader: int, readers: int) -> int:
        """What a reader reads in the next step, as a bitmap."""
        plan = StepPlan(self.cursor, BATCHING, readers)
        return bitmap(span for batch in plan.of(reader) if batch.weight for span in batch.ranges)

    def after(self, got: int, places: int, ranks: int, missing: Collection[int]) -> Samples:
        """After a commit among `places` groups whose ring carried the samples `got`, and nothing of `missing`."""
        there = contributed(places, missing)
        readers = None if there is None else {place * ranks + rank for place in there for rank in range(ranks)}
        cursor = StepPlan(self.cursor, BATCHING, places * ranks).after(readers)
        return replace(self, cursor=cursor, taken=self.taken | got if cursor.epoch == self.cursor.epoch else 0)


def accounted(before: Cursor, after: Cursor) -> int:
    """The samples of the epoch `before` is in that are committed, says the cursor."""
    if after.epoch != before.epoch:
        return (1 << before.length) - 1
    return bitmap(((0, after.taken),)) & ~bitmap(after.returned)


def bitmap(ranges: Iterable[tuple[int, int]]) -> int:
    """The positions in half-open ranges, none of which overlap."""
    return sum((1 << stop) - (1 << start) for start, stop in ranges)
