"""The division of a step's samples among its readers. Pure: all replicas compute the same, without messages.

`Batching` is what the user asked for, `plan_step` applies it to a cursor and a number of readers. A *reader* is one
rank of one participating replica group; readers are numbered in the order of the quorum. Two ways to size a step:

- `batch_size` alone: every reader gets `batch_size` samples, `accumulation_steps` times. The optimizer's batch follows
  the membership.
- with `global_batch_size`: the step has that many samples whatever the membership, cut into micro-batches of at most
  `batch_size` (what fits into memory); fewer readers make more micro-steps.

A step's samples are divided evenly; the first readers get one more if need be. In the last step of an epoch fewer are
left: shares are short, or empty. Shares of different size are averaged exactly by weight. With `fixed_micro_batches`
the step is cut into micro-batches first, which are then dealt out whole: the cuts, and their numbers, do not depend on
the membership, which a reduction in a fixed order of micro-batches needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.data.cursor import Cursor, Ranges, part, size_of
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Batching", "MicroBatch", "StepPlan", "plan_step"]


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ConfigError(f"{name}={value}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Batching:
    """How steps are sized. The same on all replicas.

    Args:
        batch_size: samples in one micro-batch at most: what one forward and backward pass has memory for.
        global_batch_size: samples in one optimizer step over all readers; None: readers * batch_size *
            accumulation_steps.
        accumulation_steps: micro-batches per step and reader, without `global_batch_size`.
        max_micro_steps: with `global_batch_size`, refuse more micro-batches per step and reader than this.
        min_readers: with `max_micro_steps`, the fewest readers that have to be able to make a whole step.
        fixed_micro_batches: deal out whole micro-batches; needs `global_batch_size`.

    Raises:
        ConfigError: a value is out of range, two exclude each other, or `min_readers` cannot make a whole step.
    """

    batch_size: int
    global_batch_size: int | None = None
    accumulation_steps: int = 1
    max_micro_steps: int | None = None
    min_readers: int = 1
    fixed_micro_batches: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation_steps", "min_readers"):
            _positive(name, getattr(self, name))
        if self.global_batch_size is None:
            if self.fixed_micro_batches:
                raise ConfigError("fixed_micro_batches=True needs global_batch_size: else steps follow the membership")
            if self.max_micro_steps is not None:
                raise ConfigError("max_micro_steps is for global_batch_size; without it set accumulation_steps")
            return
        _positive("global_batch_size", self.global_batch_size)
        if self.accumulation_steps != 1:
            raise ConfigError(
                f"accumulation_steps={self.accumulation_steps} with global_batch_size={self.global_batch_size}: the "
                "number of micro-steps follows from the global batch; leave accumulation_steps out"
            )
        if self.max_micro_steps is not None:
            _positive("max_micro_steps", self.max_micro_steps)
            self.check(self.min_readers)

    def step_size(self, readers: int) -> int:
        """Samples in a whole step."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return readers * self.batch_size * self.accumulation_steps

    def micro_steps(self, readers: int) -> int:
        """Micro-batches of the busiest reader in a whole step."""
        if self.fixed_micro_batches:
            return -(-math.ceil(self.step_size(readers) / self.batch_size) // readers)
        return math.ceil(-(-self.step_size(readers) // readers) / self.batch_size)

    def check(self, readers: int) -> None:
        """Raise ConfigError if so many readers cannot make a whole step within `max_micro_steps`."""
        needed = self.micro_steps(readers)
        if self.max_micro_steps is not None and needed > self.max_micro_steps:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} cannot be divided among {readers} "
                f"reader{'s' if readers > 1 else ''}: with batch_size={self.batch_size} (what memory holds) each would "
                f"need {needed} micro-steps, max_micro_steps={self.max_micro_steps}; raise max_micro_steps or "
                "batch_size, lower global_batch_size, or require more replicas (min_readers, and the Manager's "
                "min_replica_size)"
            )

    def epoch_batches(self, length: int, readers: int, reader: int = 0) -> int:
        """Micro-batches that a reader sees in an undisturbed epoch of `length` samples."""
        whole, rest = divmod(length, self.step_size(readers))
        per_step = len(self.cuts(self.step_size(readers), readers, reader)) if whole else 0
        return whole * per_step + (len(self.cuts(rest, readers, reader)) if rest else 0)

    def share(self, total: int, readers: int, reader: int) -> tuple[int, int]:
        """First and last (exclusive) sample number of a reader in a step of `total` samples."""
        unit = self.batch_size if self.fixed_micro_batches else 1
        each, more = divmod(-(-total // unit), readers)
        first = reader * each + min(reader, more)
        last = first + each + (reader < more)
        return min(total, unit * first), min(total, unit * last)

    def cuts(self, total: int, readers: int, reader: int) -> list[tuple[int, int]]:
        """First and last (exclusive) sample number of each micro-batch of a reader; of a filler if it has none."""
        first, last = self.share(total, readers, reader)
        cuts = [(low, min(last, low + self.batch_size)) for low in range(first, last, self.batch_size)]
        return cuts or [(0, min(total, self.batch_size))]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One batch that the training loop sees."""

    epoch: int
    ranges: Ranges
    """Positions in the epoch's order."""
    weight: int
    """Samples in it that count: all, or 0 for a filler."""
    number: int
    """With `fixed_micro_batches`: which micro-batch of the step this is, the same for every membership."""
    last: bool
    """The last one of its step: gradients are reduced, the optimizer steps."""

    @property
    def size(self) -> int:
        """Samples in it."""
        return size_of(self.ranges)

    @property
    def key(self) -> tuple[int, Ranges]:
        """What it holds: equal keys mean equal samples."""
        return self.epoch, self.ranges


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The samples of one step and how they are divided."""

    cursor: Cursor
    batching: Batching
    readers: int

    @property
    def samples(self) -> int:
        """Samples in this step over all readers; at least 1."""
        return min(self.cursor.left, self.batching.step_size(self.readers))

    def of(self, reader: int | None) -> tuple[MicroBatch, ...]:
        """The micro-batches of a reader, at least one.

        A reader whose share is empty, and a member that does not participate (None), get a *filler*: the first samples
        of the step, with weight zero. They have to take part in the collectives, and a loop needs a batch for that.
        """
        total, batching, epoch = self.samples, self.batching, self.cursor.epoch
        positions = self.cursor.ahead(total)
        first, last = (0, 0) if reader is None else batching.share(total, self.readers, reader)
        counts = last > first
        size = batching.batch_size
        if not counts:
            last = min(total, size)  # a filler
        return tuple(
            [
                MicroBatch(epoch, part(positions, low, high), high - low if counts else 0, low // size, high == last)
                for low in range(first if counts else 0, last, size)
                for high in (min(last, low + size),)
            ]
        )

    def after(self, contributed: Collection[int] | None = None) -> Cursor:
        """The cursor once this step was committed.

        Args:
            contributed: readers whose gradient is in the sum; None: all. Samples of the others are handed out again.
        """
        total = self.samples
        if contributed is None:
            return self.cursor.after(total)
        positions = self.cursor.ahead(total)
        missing: list[tuple[int, int]] = []
        for reader in range(self.readers):
            if reader not in contributed:
                missing += part(positions, *self.batching.share(total, self.readers, reader))
        return self.cursor.after(total, tuple(missing))


def plan_step(cursor: Cursor, batching: Batching, readers: int) -> StepPlan:
    """What the step after `cursor` consists of.

    Raises:
        ConfigError: so few readers cannot make a whole step (`Batching.max_micro_steps`).
    """
    assert readers >= 1
    batching.check(readers)
    return StepPlan(cursor, batching, readers)
