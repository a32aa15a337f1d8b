"""A step between its opening and its vote, as one rank sees it. Threads: the training thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.data.step_division import MicroBatch, StepPlan

__all__ = ["OpenStep", "Reader"]


@dataclass(frozen=True, slots=True)
class Reader:
    """Which of the step's readers this rank is; `number` None: it does not participate."""

    number: int | None
    readers: int


@dataclass(slots=True)
class OpenStep:
    """The step between its opening and its vote."""

    plan: StepPlan
    reader: Reader
    micro_batches: tuple[MicroBatch, ...]
    handed_out: int = 0
    """Micro-batches that the training loop has got."""
    weights: tuple[int, ...] = ()
    """Weights of the group's micro-batches, if its ranks read different samples and all have the same number."""

    @property
    def complete(self) -> bool:
        """The training loop has all of it: the vote is next."""
        return self.handed_out == len(self.micro_batches)
