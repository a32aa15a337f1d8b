"""The reducer that sums micro-batches in the order of their numbers, whoever ran them: `FixedOrderDataParallel`'s.

How it works. The gradient of each micro-batch is taken on its own when its backward ends, multiplied by its share of
the step's samples, and added to those of this member's other micro-batches along the tree of `tree_sum`. When
the last one of the step is there, `tree_exchange` brings everybody's nodes to everybody, who does the remaining
additions. Gradients are final when that `backward()` returns; the fence goes last, on its own.

If a micro-batch is in no node (its replica failed, or could not heal), whoever contributed reports it: the step is
vetoed and done again, with the same micro-batches.

Memory besides the gradients: nodes as large as the gradients, log2(k) + 1 of them for k micro-batches of a member whose
share begins at a multiple of a power of two not below k, else at most 2 * log2(k) + 2; and the exchange's buffers.

Invariants:
- A member that contributes has all of its micro-batches in its nodes, or none and reports that.
- Errors of peers go to the attempt and never leave backward; the caller's mistakes are raised.

Threads: hooks run on the thread that executes that part of backward, one at a time as all parameters are on one device;
everything else on the training thread, outside forward and backward.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ft_core.errors import CollectiveError, UsageError
from ft_core.reduction.autograd import NO_GRAPH_TASK, graph_task_id, is_nested_backward, queue_callback
from ft_core.reduction.fixed_order.tree_exchange import Chunk, Header, NodeExchange, Told
from ft_core.reduction.fixed_order.tree_sum import Node, OrderedSum
from ft_core.reduction.flat_buckets import FlatGradients
from ft_core.reduction.interface import FENCE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.data.step_division import MicroBatch
    from ft_core.reduction.bucket_plan import BucketPlan
    from ft_core.reduction.interface import ReducerHost, ReductionAttempt


class _Stage(Enum):
    """The stage of the micro-batch that was handed out last."""

    NONE = "none"
    """There is none: the step has not begun, or was voted on."""
    WAITING = "waiting for backward"
    RUNNING = "in backward"
    DONE = "done"


class Partial:
    """The gradients and the loss of one node of this member. `loss` is a float64 without dimensions."""

    __slots__ = ("loss", "memory")

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.memory = FlatGradients(plan, parameters, [device])
        self.loss = torch.zeros((), dtype=torch.float64, device=device)


class FixedOrderReducer:
    """The reducer of one module whose gradients are summed in a fixed order. See the head of this file.

    Args:
        manager: whose attempts the gradients belong to.
        parameters: in the order of `plan.trained`, all on `device`.
        plan: planned with `find_unused` and without buffers.
        device: of the parameters.
        max_count: micro-batches in a step at most.
        module: asked for its buffers, which forward may not change.
    """

    def __init__(
        self, manager: ReducerHost, parameters: Sequence[nn.Parameter], plan: BucketPlan, device: torch.device,
        max_count: int, module: nn.Module,
    ) -> None:  # fmt: skip
        self._manager, self._module, self._plan, self._device = manager, module, plan, device
        self._buffer_owners = [(name, part) for name, part in module.named_modules() if part._buffers]
        self.parameters = self._parameters = list(parameters)
        self._max_count = max_count
        self._result = FlatGradients(plan, parameters, [device], device_of=manager.device_of)
        self._result.buckets[-1].device.reserve(self._result.told.nbytes)
        self._pool: list[Partial] = []
        self._sum: OrderedSum[Partial] = OrderedSum(self._add)
        self._used = bytearray(len(self._parameters))
        """1 for each parameter that a micro-batch of mine has used in this step."""
        self._losses = 0
        """Micro-batches of mine in this step whose loss was recorded."""
        self._count, self._samples = 0, 1
        self._micro: MicroBatch | None = None
        self._stage = _Stage.NONE
        self._task = NO_GRAPH_TASK
        self._loss: Tensor | None = None
        self._failed = ""
        """Why this step lacks a micro-batch of mine."""
        self._buffer_versions: dict[str, tuple[int, int]] = {}
        self._exchange = NodeExchange(self._result, device)
        self._settled: ReductionAttempt | None = None
        self._step_loss: float | None = None
        """The loss of the last reduced step; None: not recorded."""
        self.committed_loss: float | None = None
        """The loss of the last committed step; None: not recorded."""
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._parameters]

    def __repr__(self) -> str:
        number = "none" if self._micro is None else f"{self._micro.number} of {self._count}"
        return f"FixedOrderReducer(micro-batch {number}, {self._stage.value}, {self._sum!r})"

    @property
    def plan(self) -> BucketPlan:
        """The plan all replicas must share."""
        return self._plan

    # ------------------------------------------------------------------------------------------- micro-batches

    def begin(self, micro: MicroBatch, *, first: bool, count: int, samples: int) -> None:
        """A micro-batch is handed out; `first`: of its step, which has `count` of them with `samples` samples in all.

        Raises:
            UsageError: nothing was done with the one before.
        """
        if first:
            self._restart(count, samples)
        elif self._stage is _Stage.WAITING:
            raise UsageError(
                "the next micro-batch was asked for, but there was no backward() for the one before: with "
                "FixedOrderDataParallel each micro-batch has its own forward and backward, do not add up losses"
            )
        elif self._stage is _Stage.RUNNING:
            self._failed = "the backward() of a micro-batch of this step raised"
        self._micro, self._stage, self._task, self._loss = micro, _Stage.WAITING, NO_GRAPH_TASK, None
        for parameter in self._parameters:
            parameter.grad = None
        self._buffer_versions = self._versions()

    def record_loss(self, loss: Tensor) -> None:
        """The mean loss of the current micro-batch.

        Raises:
            UsageError: there is no micro-batch, or it has one already.
        """
        if self._stage not in (_Stage.WAITING, _Stage.RUNNING):
            raise UsageError("record_loss() is for the current micro-batch, before its backward()")
        if loss.numel() != 1:
            raise UsageError(f"record_loss() takes one number, the mean over the micro-batch; got {list(loss.shape)}")
        if self._loss is not None:
            raise UsageError("record_loss() was called twice for one micro-batch: record the sum of its losses")
        self._loss = loss

    def _restart(self, count: int, samples: int) -> None:
        self._pool += self._sum.clear()
        self._used[:] = bytes(len(self._used))
        self._losses, self._failed = 0, ""
        self._count, self._samples = count, samples

    def _on_gradient(self, _parameter: Tensor) -> None:
        if graph_task_id() != self._task:
            self._begin_backward()

    def _begin_backward(self) -> None:
        if self._stage is _Stage.NONE:
            raise UsageError(
                "backward() on a FixedOrderDataParallel module outside of a step: gradients belong to a micro-batch "
                "that its ElasticDataLoader has handed out; use torch.autograd.grad for others"
            )
        if self._stage is _Stage.DONE:
            raise UsageError(
                "a second backward() for the same micro-batch: with FixedOrderDataParallel its gradient is complete "
                "when the first one ends; add the losses and call backward() once"
            )
        if is_nested_backward():
            raise UsageError(_NESTED)
        if self._stage is _Stage.RUNNING:
            self._failed = "the backward() of a micro-batch of this step raised"
        self._stage, self._task = _Stage.RUNNING, graph_task_id()
        queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        micro = self._micro
        assert micro is not None
        if is_nested_backward():
            raise UsageError(_NESTED)
        self._check_buffers()
        with torch.no_grad():
            if micro.weight and not self._failed:
                self._collect(micro)
            self._stage, self._task = _Stage.DONE, NO_GRAPH_TASK
            if micro.last:
                self._sum.close(self._count)
                self._finish()

    def _collect(self, micro: MicroBatch) -> None:
        """Take this micro-batch's gradient out of the parameters and add it to its neighbours'."""
        partial = self._pool.pop() if self._pool else Partial(self._plan, self._parameters, self._device)
        views, gradients = [], []
        for index, parameter in enumerate(self._parameters):
            gradient, view = parameter.grad, partial.memory.views[index]
            if gradient is None:
                view.zero_()
                continue
            if gradient.layout != torch.strided:
                name = self._plan.trained[index].name
                raise UsageError(f"parameter {name} has a sparse gradient; only dense ones can be reduced")
            self._used[index] = 1
            views.append(view)
            gradients.append(gradient.detach())
            parameter.grad = None
        share = micro.weight / self._samples
        if views:
            torch._foreach_copy_(views, gradients)
        for bucket in partial.memory.buckets:
            bucket.gradients.mul_(share)
        if self._loss is None:
            partial.loss.fill_(float("nan"))
        else:
            self._losses += 1
            partial.loss.copy_(self._loss.detach().reshape(())).mul_(share)
        self._sum.push(Node(0, micro.number), partial)

    def _add(self, left: Partial, right: Partial) -> Partial:
        for mine, theirs in zip(left.memory.buckets, right.memory.buckets, strict=True):
            mine.gradients.add_(theirs.gradients)
        left.loss.add_(right.loss)
        self._pool.append(right)
        return left

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {
            f"{prefix}.{name}" if prefix else name: (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for prefix, part in self._buffer_owners
            for name, buffer in part._buffers.items()
            if buffer is not None
        }

    def _check_buffers(self) -> None:
        now = self._versions()
        if now != self._buffer_versions:
            changed = sorted({n for n, v in now.items() if self._buffer_versions.get(n) != v} or {"one of them"})
            raise UsageError(
                f"forward changed buffers of the module: {', '.join(changed[:5])}. They would depend on which replica "
                "ran which micro-batch, and so would the trajectory: put BatchNorm into eval(), use GroupNorm or "
                "LayerNorm, or reduce with DistributedDataParallel"
            )

    # ------------------------------------------------------------------------------------------- the reduction

    def _finish(self) -> None:
        """Reduce what is there, in the attempt that is open. Errors of the network stay in the attempt."""
        attempt = self._manager.current_attempt()
        if attempt is None:
            return
        self._settled = attempt
        try:
            if attempt.ready():
                self._reduce(attempt)
        except Exception as error:  # noqa: BLE001 (any failed collective breaks the attempt, none the process)
            attempt.fail(error)
        finally:  # after a failure; the Manager's abort makes it short
            self._exchange.works.outlast()

    def _reduce(self, attempt: ReductionAttempt) -> None:
        contributes = attempt.scale != 0.0
        if contributes and not self._complete:
            reason = self._failed or "should_commit was called before the backward() of the last micro-batch"
            attempt.report(UsageError(f"this replica lacks micro-batches of the step: {reason}"))
            contributes = False
        header = Header(self._max_count, len(self._parameters))
        if contributes:
            header.fill(self._with_losses(attempt), self._used, self._losses, self._count)
        told = self._exchange.tell(attempt, header)
        if told is None:
            return
        pending: list[Chunk] | None = []
        if told.complete:
            mine = {node: partial.memory for node, partial in self._sum.parts} if contributes else {}
            pending = self._exchange.send(attempt, told, mine)
        elif contributes:
            # `Manager.require_all_contributions` vetoes a step of which a participant is missing; but what was summed
            # must not be published either, and a different division would be somebody's error.
            attempt.report(CollectiveError(told.lack))
        if pending is None:
            return
        tail = torch.zeros(FENCE_SLOTS, device=self._device)
        works = self._exchange.works
        fence = works.add(attempt.launch_fence(tail, tail))
        if fence is None:
            return
        for chunk in pending:
            self._exchange.add_up(chunk, told)
        works.wait(fence)
        if told.complete:
            self._publish(told)
        attempt.fence_arrived(attempt.read(tail) if attempt.rides else tail)

    def _with_losses(self, attempt: ReductionAttempt) -> list[tuple[Node, float]]:
        """This member's nodes, and the loss of each."""
        if not self._sum.parts:
            return []
        losses: list[float] = attempt.read(torch.stack([partial.loss for _, partial in self._sum.parts])).tolist()
        return [(node, loss) for (node, _), loss in zip(self._sum.parts, losses, strict=True)]

    @property
    def _complete(self) -> bool:
        """All micro-batches of this member are in its nodes."""
        return self._micro is not None and self._micro.last and self._stage is _Stage.DONE and not self._failed

    def _publish(self, told: Told) -> None:
        """The sums are there: they are the parameters' gradients now."""
        result = self._result
        result.pack_used(torch.tensor(told.used, dtype=torch.float32))
        for parameter, view, used in zip(self._parameters, result.views, told.used, strict=True):
            parameter.grad = view if used else None
        self._step_loss = told.loss

    # ----------------------------------------------------------------------------- GradientReducer: called by Manager

    def flush(self) -> None:
        """Take part in the current attempt if no backward of it has. Never raises."""
        attempt = self._manager.current_attempt()
        if attempt is None or attempt is self._settled:
            return
        with torch.no_grad():
            self._finish()

    def rescale(self, factor: float) -> None:
        """Nothing: gradients are divided by the samples of the step, all of which are in the sum."""

    def committed(self) -> None:
        """The attempt was committed."""
        self._settle()
        self.committed_loss = self._step_loss

    def vetoed(self) -> None:
        """The attempt was not committed."""
        self._settle()

    def _settle(self) -> None:
        self._settled = self._micro = None
        self._stage = _Stage.NONE

    def step_opens(self) -> None:
        """Collecting the state changes nothing here."""

    def state_loaded(self) -> None:
        """Nothing here depends on the module's state."""

    def buffer_storages(self) -> set[int]:
        """Addresses of the storages of all buffers."""
        return {buffer.untyped_storage().data_ptr() for buffer in self._module.buffers()}

    def remove_hooks(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


_NESTED = (
    "activation checkpointing with use_reentrant=True runs a backward inside the backward, and FixedOrderDataParallel "
    "cannot tell when a micro-batch's gradient is complete: pass use_reentrant=False"
)


__all__ = ["FixedOrderReducer", "Partial"]
