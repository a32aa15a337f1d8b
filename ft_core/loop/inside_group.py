"""`InsideGroup`: what the ranks of one replica group agree on, and average, among themselves.

How it works. Each rank reduces with its peers in the other groups, on a ring of its own. The divisor is the sum of
weights that the ring's commit vote found (R10: gradients are divided by what was contributed), which may differ from
the planned one and from ring to ring; so each rank's gradients are corrected before they are averaged inside the group.
Whether there is something new to average follows from what the script did, which all ranks know alike: on one ring the
vote may have failed, and a rank that stays away would leave the others waiting.

Invariant: all ranks of the group make the same calls in the same order. Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.ddp import DistributedDataParallel
    from ft_core.runtime.step_attempt import StepAttempt


class InsideGroup:
    """The ranks of one replica group, in one run.

    Args:
        ranks: processes of this replica group.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.passes = 0
        """Forward and backward passes whose gradients are to be synchronized, as the script made them."""
        self._final: object = None
        """The verdict, or with several ranks the attempt and the passes, for which gradients were made final."""
        self._planned: tuple[StepAttempt | None, int] = None, 1
        """The attempt, and by which number of participants its gradients are divided."""

    def __repr__(self) -> str:
        return f"InsideGroup({self._ranks} ranks, {self.passes} passes)"

    def settle(self, attempt: StepAttempt | None, models: Sequence[DistributedDataParallel]) -> None:
        """Make the gradients of `attempt` final, before they are clipped, unscaled or used: the same on all ranks."""
        if attempt is None or (self._ranks == 1 and attempt.verdict is not None and attempt.verdict is self._final):
            return  # clipping and the step ask again
        if not any(model.gradient_reducer.unsettled for model in models):
            return
        self._rescale(attempt, models)
        final = attempt.verdict if self._ranks == 1 else (attempt.number, self.passes)
        if final != self._final and self._ranks > 1:
            for model in models:
                if model.gradient_reducer.unsettled:
                    model.gradient_reducer.average_inside(torch.distributed.all_reduce, self._ranks)
        self._final = final

    def _rescale(self, attempt: StepAttempt, models: Sequence[DistributedDataParallel]) -> None:
        if attempt is not self._planned[0]:
            self._planned = attempt, attempt.planned
        weight = attempt.verdict.weight if attempt.verdict is not None else 0
        if weight:
            if weight != self._planned[1]:
                for model in models:
                    model.gradient_reducer.rescale(self._planned[1] / weight)
                self._planned = attempt, weight
            attempt.planned = weight

    def share_buffers(self, models: Sequence[DistributedDataParallel]) -> None:
        """Give all ranks the buffers of the group's first one, as torch's DDP does: each ring has its own."""
        if self._ranks > 1:
            for model in models:
                for buffer in model.buffers() if model.broadcast_buffers else ():
                    torch.distributed.broadcast(buffer, 0)

    def minimum(self, number: int, device: torch.device) -> int:
        """The smallest number of any rank."""
        return self._reduce(number, device, ReduceOp.MIN)

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether it is so on any rank."""
        return bool(self._reduce(int(here), device, ReduceOp.MAX))

    def _reduce(self, number: int, device: torch.device, operation: ReduceOp.RedOpType) -> int:
        if self._ranks == 1:
            return number
        inside = torch.tensor([number], device=device)
        torch.distributed.all_reduce(inside, operation)
        return int(inside)
