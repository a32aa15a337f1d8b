"""What a training script reduces and reports besides its gradients: a part of `Manager`.

How it works. `allreduce` launches a collective on the lane of the user's own (R4) and never raises for what a peer
does: a failure breaks the attempt. The session keeps what is under way, because `should_commit` waits for it.

Threads: the training thread; futures report on the thread that completes them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch.distributed import ReduceOp

from ft_core.errors import ConfigError, UsageError
from ft_core.futures import future_timeout
from ft_core.runtime.communicators import sum_options
from ft_core.runtime.managed_work import ManagedWork, managed_work
from ft_core.runtime.reduce_operations import name_of, neutral_element

if TYPE_CHECKING:
    from torch.futures import Future

    from ft_core.protocol.rank.rank import Step
    from ft_core.runtime.quorum_worker import Round
    from ft_core.runtime.session import Session
    from ft_core.runtime.startup import Config
    from ft_core.runtime.step_attempt import StepAttempt

T = TypeVar("T")


class Collectives:
    """Mixed into `Manager`."""

    _attempt: StepAttempt | None
    _config: Config
    _riding: bool
    _round: Round | None
    _session: Session
    _step: Step

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> ManagedWork:
        """Reduce `tensor` in place over the participants of the quorum; AVG divides by their number.

        Errors are recorded and veto the step, never raised; after one the tensor's content is undefined. Members
        that do not participate (healing, spare, out of data, soft failure) contribute the operation's neutral element
        (0 to a sum, -inf to a maximum), and get the result, too. AVG is weighted (`set_batch_weight`), the other
        operations are not. All replicas must make the same calls in the same order. `should_commit` waits for those
        that are still under way; one that failed breaks the attempt.

        Returns:
            A Work; `wait()` returns the tensor when it is ready, `get_future()` resolves to it. In a backward pass it
            is a `torch.futures.Future` as well, so that a communication hook of torch's DDP may return it.

        Raises:
            ConfigError: an operation that is not defined for the dtype (AVG of integers, MAX of complex numbers), or
                quantization, which is not there yet.
        """
        if should_quantize:
            raise ConfigError("should_quantize=True needs quantized collectives, which are not in this version")
        name = name_of(reduce_op, tensor.dtype)
        attempt = self._attempt
        if attempt is None:
            raise UsageError("allreduce before start_quorum")
        session, step = self._session, self._step
        usable = attempt.usable()
        with session.lock:
            if not usable or not step.launching_user_op():
                return managed_work(None, tensor)
        try:
            average = name == "AVG"
            scale = attempt.whole_scale if average else float(attempt.contributes)
            if scale == 0.0:
                tensor.fill_(neutral_element(name, tensor.dtype))
            elif average:
                tensor.mul_(scale)
            session.expect(works_only=True)
            lane = session.lanes.second() if self._riding else session.lanes.main
            options = sum_options(ReduceOp.SUM if average else reduce_op)
            work = lane.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)
            session.works.add(work)
            if average:
                attempt.averaged.append(tensor)
        except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
            session.fail(error)
            return managed_work(None, tensor)
        return managed_work(work, tensor, session.fail)

    def wrap_future(self, fut: Future[T], default: T, timeout: timedelta | None = None) -> Future[T]:
        """Return a future that never fails: an error, or `timeout`, is reported and `default` is its value.

        `should_commit` waits until it is done, so a step commits only without such an error.
        """
        bounded = future_timeout(fut, timeout or timedelta(seconds=self._config.budget.timeout_s))

        def settle(done: Future[T]) -> T:
            try:
                return done.value()
            except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
                self.report_error(error)
                return default

        settled = cast("Future[T]", bounded.then(settle))
        self._session.works.add_future(settled)
        return settled

    def report_error(self, e: Exception) -> None:
        """Record an error that leaves the process group usable: zeros are contributed and everybody skips the step."""
        with self._session.lock:
            self._step.fail_softly(f"{type(e).__name__}: {e}")
            if self._session.error is None:
                self._session.error = e

    def errored(self) -> Exception | None:
        """What went wrong in this attempt, or None."""
        late = self._round.error if self._round is not None else None
        return self._session.error or late
