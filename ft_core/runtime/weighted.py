"""The weight of this replica's gradient in a step: a part of `Manager`. What weights do: `reduction.batch_weights`.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import UsageError

if TYPE_CHECKING:
    from ft_core.data.interface import DataListener
    from ft_core.reduction.batch_weights import BatchWeights
    from ft_core.runtime.session import Session
    from ft_core.runtime.step_attempt import StepAttempt


class Weighted:
    """Mixed into `Manager`."""

    _attempt: StepAttempt | None
    _session: Session
    _weights: BatchWeights
    _data: DataListener | None

    def set_batch_weight(self, weight: int) -> None:
        """Samples (or tokens) in the micro-batch whose forward comes next; its loss is the mean over them.

        Call it once per micro-batch, or never, between `start_quorum` and the forward; the weights of a step add up.
        Committed is then the gradient of the mean over all samples of all replicas. A replica that sets no weight
        counts as 1. In a group of several ranks a weight counts on the ring of its rank.

        Raises:
            ConfigError: it is not an integer from 0 on, or the step's sum is more than 2**32 - 1.
            UsageError: `allreduce` averaged something in this step, which was weighted with the sum so far; or a
                backward of this step was reduced in which this replica's weight was 0; or an elastic loader is
                attached, which weighs its micro-batches itself.
        """
        if self._data is not None:
            raise UsageError(
                f"set_batch_weight({weight!r}) with an elastic loader: it weighs each micro-batch by its samples, and "
                "weights add up; leave it out"
            )
        self.weigh(weight)

    def weigh(self, weight: int) -> None:
        """`set_batch_weight` for elastic data (`data.interface`): who divides samples weighs them. Raises as it."""
        if self._attempt is not None and self._attempt.averaged:
            raise UsageError(
                "set_batch_weight after an allreduce of the same step: that average used the weights known then; set "
                "all weights of a step before its first allreduce (or use reduce_op=SUM for what needs no weights)"
            )
        total = self._weights.add(weight)
        with self._session.lock:
            self._session.step.weigh(total)

    @property
    def batch_ratio(self) -> float:
        """For carriers: what the outputs of the next forward are weighed with."""
        return self._weights.ratio

    def _reset_weights(self) -> None:
        if self._weights.total is not None:
            self._weights.reset()
            self._session.step.weigh(None)
