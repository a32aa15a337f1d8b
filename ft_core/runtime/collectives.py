"""What a training script reduces and reports besides its gradients.

How it works. `allreduce` launches a collective on the group for the script's own (R4) and never raises for what a peer
does: a failure breaks the attempt. A mistake of the caller's (an operation, a tensor on a device that no group here
carries, one that is not contiguous) is raised before anything of the tensor or the attempt has changed. The shell keeps
what is under way, because `should_commit` waits for it.

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
from ft_core.runtime.reduce_operations import in_place, name_of, neutral_element

if TYPE_CHECKING:
    from torch.futures import Future

    from ft_core.runtime.steps import Steps

T = TypeVar("T")


class Collectives:
    """What one rank's script reduces and reports."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._shell, self._rank = steps, steps.shell, steps.rank

    def __repr__(self) -> str:
        return f"Collectives({self._shell.works!r})"

    def allreduce(self, tensor: torch.Tensor, reduce_op: ReduceOp.RedOpType) -> ManagedWork:
        """As `Manager.allreduce`."""
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"tensor={tensor!r}: allreduce reduces a torch.Tensor in place; use torch.tensor(...)")
        name = name_of(reduce_op, tensor.dtype)
        attempt = self._steps.attempt
        if attempt is None:
            raise UsageError("allreduce before start_quorum")
        shell = self._shell
        shell.communicators.check("allreduce", [tensor])  # as all members find it: it is no failure of this step
        usable = attempt.usable()
        with shell.lock:
            if not usable or not self._rank.may_launch_user_op():
                return managed_work(None, tensor)
        try:
            average = name == "AVG"
            scale = attempt.whole_scale if average else float(attempt.contributes)
            with in_place(tensor):
                if scale == 0.0:
                    tensor.fill_(neutral_element(name, tensor.dtype))
                elif average:
                    tensor.mul_(scale)
            shell.limits.expect(works_only=True)
            group = shell.communicators.users(tensor)
            options = sum_options(ReduceOp.SUM if average else reduce_op)
            work = group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)
            if group.blocks_host:
                shell.works.add(work)
            else:
                shell.works.add_on_device(work, group, shell.communicators.device_of(tensor.device))
            if average:
                attempt.averaged.append(tensor)
        except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
            shell.fail(error)
            return managed_work(None, tensor)
        return managed_work(work, tensor, shell.fail)

    def wrap_future(self, future: Future[T], default: T, timeout: timedelta | None) -> Future[T]:
        """As `Manager.wrap_future`."""
        bounded = future_timeout(future, timeout or timedelta(seconds=self._shell.budget.timeout_s))

        def settle(done: Future[T]) -> T:
            try:
                return done.value()
            except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
                self._shell.report(error)
                return default

        settled = cast("Future[T]", bounded.then(settle))
        self._shell.works.add_future(settled)
        return settled
