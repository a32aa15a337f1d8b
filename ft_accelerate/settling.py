"""`Settling`: reduced gradients are made final before they are clipped, unscaled or used, the same on all ranks.

How it works. The divisor is the fence's sum of weights (R10), which may differ from the planned one; the rings of a
group's ranks may have had different ones, so each is corrected before they are mixed. In a group of several ranks the
gradients are then averaged inside. Whether there is something new to average follows from what the script did, which
all ranks know alike: on one ring the fence may have failed, and a rank that stays away would leave the others waiting.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_accelerate.wrapping import WrappedModel
    from ft_core.runtime.step_attempt import StepAttempt


class Settling:
    """Of one run.

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
        return f"Settling({self._ranks} ranks, {self.passes} passes)"

    def settle(self, attempt: StepAttempt | None, models: Sequence[WrappedModel]) -> None:
        """Make the gradients of `attempt` final."""
        if attempt is None or (self._ranks == 1 and attempt.verdict is not None and attempt.verdict is self._final):
            return  # clipping and the step ask again
        if not any(model.carrier.unsettled for model in models):
            return
        self._rescale(attempt, models)
        final = attempt.verdict if self._ranks == 1 else (attempt.number, self.passes)
        if final != self._final and self._ranks > 1:
            for model in models:
                if model.carrier.unsettled:
                    model.carrier.average_inside(torch.distributed.all_reduce, self._ranks)
        self._final = final

    def _rescale(self, attempt: StepAttempt, models: Sequence[WrappedModel]) -> None:
        if attempt is not self._planned[0]:
            self._planned = attempt, attempt.planned
        weight = attempt.verdict.weight if attempt.verdict is not None else 0
        if weight:
            if weight != self._planned[1]:
                for model in models:
                    model.carrier.rescale(self._planned[1] / weight)
                self._planned = attempt, weight
            attempt.planned = weight
