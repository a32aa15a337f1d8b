"""`BucketReducer`: gradients go into flat buffers as they arrive, and each buffer is reduced while backward goes on.

A hook on every trained parameter runs when its gradient is complete. It multiplies the gradient with the attempt's
scale straight into the parameter's view of its bucket (one pass, the rounding of torch's DDP) and makes that view the
parameter's `.grad`. A bucket whose last gradient arrived is launched, in plan order: a complete one waits for those
before it. At the end of backward whatever did not arrive is filled in (with the accumulated gradient if there is one,
else with zeros; None in the end, if all did so), the rest is launched, and all works are waited for, so gradients are
valid when `backward()` returns.

A *reduction* is one such backward. It is opened by the first hook, closed at the end of backward or by `flush`.
Invariants:
- Buckets are launched in plan order, all of them, the fence with the last one; after a failure nothing more is.
- No error of a peer or of the network leaves backward: it goes to `ReductionAttempt.fail`, and until the next backward
  the gradients are garbage (partly scaled, partly reduced). Mistakes of the caller (a sparse gradient, one parameter
  twice in one backward) are raised, after they were reported too.
- A backward that raised in the middle is completed with zeros and reported (`ReductionAttempt.report`): the peers'
  collectives stay aligned, and the step is vetoed.
- A flat buffer is never written while a collective may still use it: every work launched is waited for, also after a
  failure (the Manager's abort is what makes that short). On a device waiting puts what is queued next behind the work;
  what the host decides by (the fence, which gradients nobody has) it takes from `ReductionAttempt.read` alone.
- A member that does not contribute (scale 0) puts in exact zeros, whatever its gradients are.

Threads: hooks run on the thread that executes that part of backward: the caller's on CPU, one thread per device on
CUDA. All parameters of a bucket are on one device, so `pending` has one writer; opening a reduction and launching are
guarded by `_lock`. Everything else is called on the training thread, outside forward and backward.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ft_core.errors import CollectiveError, UsageError
from ft_core.reduction.autograd import NO_GRAPH_TASK, graph_task_id, is_nested_backward, queue_callback
from ft_core.reduction.buffer_sync import BufferSync
from ft_core.reduction.flat_buckets import FlatGradients, copy_special

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.reduction.bucket_plan import BucketPlan
    from ft_core.reduction.interface import Parameter, PendingWork, ReducerHost, ReductionAttempt

    Allocated = tuple[FlatGradients, BucketPlan, Tensor]


class _Reduction:
    """What hooks read on every gradient. `scale` is None unless a reduction is open and copying makes sense."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale: Tensor | None = None


_NOT_CONTRIBUTING = torch.zeros(())
"""Stands for scale 0, compared by identity: multiplying with zero would keep NaN and inf."""

_TWICE = """parameter {} got its gradient twice in one backward(): it is used in several reentrant checkpoints (pass \
use_reentrant=False), or the previous backward() raised"""


class BucketReducer:
    """The reducer of one module: see the head of this file, and `interface.GradientReducer` for the public methods.

    `parameters` in the order of `plan.trained`; `devices` by the plan's device numbers; `buffer_owners` are the
    (module, key) pairs of `plan.buffers`; `module` is only asked for the storages of its buffers.
    """

    def __init__(
        self, manager: ReducerHost, module: nn.Module, parameters: Sequence[Parameter], plan: BucketPlan,
        devices: Sequence[torch.device], buffer_owners: Sequence[list[tuple[nn.Module, str]]],
    ) -> None:  # fmt: skip
        self._manager, self._module, self._plan = manager, module, plan
        memory, carrier, carrying = self._allocate(parameters, devices)
        self._memory = memory
        self._buckets, self._views, self.parameters = memory.buckets, memory.views, memory.parameters
        self._bucket_count = len(memory.buckets)
        with torch.inference_mode(False):
            self.buffers = BufferSync(buffer_owners, carrier, carrying)
        self._arrived = bytearray(len(memory.parameters))
        """1 for each parameter whose gradient is in its bucket in this reduction."""
        self._nothing_arrived = bytes(len(memory.parameters))
        self._arrived_tensor = torch.frombuffer(self._arrived, dtype=torch.uint8)

        self._lock = threading.Lock()
        self._reduction = _Reduction()
        self._open = False
        self._deferred = False
        """The end of a nested backward was reached; the reduction goes on in the outer one."""
        self._opened_by_output = False
        """The reduction's end is that of the outermost backward."""
        self._broken = False
        self._attempt: ReductionAttempt | None = None
        self._next = 0
        """The bucket to launch next."""
        self._works: list[PendingWork] = []
        self._settled: ReductionAttempt | None = None
        """The attempt whose last reduction ended since the last verdict; `flush` has nothing to add to it."""
        self._armed, self._consumed = False, True
        self._scale_value, self._scale_tensor = 1.0, torch.tensor(1.0, dtype=torch.float64)
        self.watches_outputs = False
        """Set once a nested (reentrant) backward was seen: forward must then call `watch_output`."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))
            for index, parameter in enumerate(memory.parameters)
        ]

    def _allocate(self, parameters: Sequence[Parameter], devices: Sequence[torch.device]) -> Allocated:
        """The memory of the gradients, and in whose tail, and where, the buffers travel."""
        memory = FlatGradients(self._plan, parameters, devices, device_of=self._manager.device_of)
        memory.buckets[-1].device.reserve(memory.told.nbytes)  # of its tail, which is all that is put there
        return memory, self._plan, memory.buckets[-1].flat

    def __repr__(self) -> str:
        state = "broken" if self._broken else f"{self._next}/{self._bucket_count} launched" if self._open else "idle"
        size = f"{len(self._arrived)} parameters, {self._bucket_count} buckets"
        return f"BucketReducer({size}, plan {self._plan.digest:016x}, {state})"

    # ------------------------------------------------------------------------------------------- forward and backward

    @property
    def plan(self) -> BucketPlan:
        """The plan all replicas must share."""
        return self._plan

    def before_forward(self, *, sync: bool) -> None:
        """Before a forward that records a graph. `sync=False`: the next backward only accumulates (no_sync).

        As in torch's DDP a backward is reduced if a synchronizing forward ran since the last reduced backward. Unlike
        there, further backwards are reduced too (two losses, retain_graph) until a forward under no_sync.
        """
        if self._open and graph_task_id() == NO_GRAPH_TASK:
            self._drop_unfinished()
        if sync:
            self._armed, self._consumed = True, False
        elif self._consumed:
            self._armed = False
        self.buffers.save()

    def before_backward(self, *, sync: bool) -> None:
        """Decide about the next backward alone: for several, some of them under no_sync, after one forward."""
        self._armed, self._consumed = sync, not sync

    @property
    def batch_ratio(self) -> float:
        """What the outputs of the next forward are weighed with; 1.0 without batch weights."""
        return self._manager.batch_ratio

    @property
    def unsettled(self) -> bool:
        """A reduction was opened since the last verdict: the next vote is about its gradients."""
        return self._open or self._settled is not None

    def watch_output(self, output: Tensor) -> None:
        """Open the reduction in the backward that starts at `output`, not in a nested one (reentrant checkpoints)."""
        output.register_hook(self._open_outer)

    def remove_hooks(self) -> None:
        """Let go of the parameters; gradients are no longer reduced."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        # The inner loop of the whole package in terms of Python: everything it needs is a local of this closure.
        view, bucket, arrived, round_ = (
            self._views[index],
            self._memory.bucket_of[index],
            self._arrived,
            self._reduction,
        )
        multiply, not_contributing, begin, advance = torch.mul, _NOT_CONTRIBUTING, self._begin, self._advance

        def on_gradient(parameter: Tensor) -> None:
            scale = round_.scale
            if scale is None:
                if not begin():
                    return
                scale = round_.scale
                if scale is None:
                    return
            if arrived[index]:
                self._reject(UsageError(_TWICE.format(self._name(index))), None)
            arrived[index] = 1
            try:
                if scale is not_contributing:
                    view.zero_()
                else:
                    multiply(parameter.grad, scale, out=view)  # type: ignore[arg-type]
                parameter.grad = view
            except RuntimeError as error:
                self._copy_special(index, scale, error)
            bucket.pending -= 1
            if not bucket.pending:
                advance()

        return bucket.on_stream(on_gradient)

    def _begin(self) -> bool:
        """Open a reduction if this gradient is to be reduced. Called by every hook that finds none open."""
        if not self._armed:
            return False
        with self._lock:
            if self._open:
                if self._deferred:
                    self._deferred = False
                    self._reduction.scale = self._scale_tensor if self._scale_value else _NOT_CONTRIBUTING
                    queue_callback(self._end_of_backward)
                return not self._broken
            attempt = self._manager.current_attempt()
            if attempt is None:
                raise UsageError(
                    "backward() on a DistributedDataParallel module, but no step was started: call start_quorum() "
                    "or ft_core's optimizer.zero_grad() first; with ft_accelerate, put the model in train() mode"
                )
            if started := self._start(attempt):
                queue_callback(self._end_of_backward)
            self._consumed |= not started  # else a next forward under no_sync would leave the hooks armed
            return started

    def _start(self, attempt: ReductionAttempt) -> bool:
        """Reset all reduction state; False if the attempt is broken, then there is no reduction."""
        if attempt is self._settled and self._broken:
            return False
        again = attempt is self._settled
        self._reset(attempt)
        if not attempt.ready():
            if again:  # the gradients that were reduced before get a local part now: an earlier fence must not count
                attempt.fail(CollectiveError("a further backward() of this step could not be reduced"))
            self._broken, self._settled = True, attempt
            return False
        self._open_with(attempt.scale)
        return True

    def _reset(self, attempt: ReductionAttempt) -> None:
        self._attempt, self._settled = attempt, None
        self._broken = self._deferred = self._opened_by_output = False
        self._next = 0
        self._arrived[:] = self._nothing_arrived
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)

    def _open_with(self, value: float) -> None:
        if value != self._scale_value:
            # A 0-dim float64 tensor rounds like the Python number DDP's reducer uses, and costs half of its time here.
            self._scale_value, self._scale_tensor = value, torch.tensor(value, dtype=torch.float64)
        self._open = True
        self._reduction.scale = self._scale_tensor if value else _NOT_CONTRIBUTING

    def _advance(self) -> None:
        """Launch every bucket that is complete and whose predecessors are launched."""
        with self._lock:
            while self._next < self._bucket_count and not self._buckets[self._next].pending and not self._broken:
                self._launch(self._next)

    def _launch(self, index: int) -> None:
        attempt, bucket = self._attempt, self._buckets[index]
        assert attempt is not None
        try:
            bucket.join_streams()
            if index < self._bucket_count - 1:
                work = attempt.launch(bucket.flat)
            else:
                self.buffers.pack(source=attempt.is_source)
                self._memory.pack_used(self._arrived_tensor if self._scale_value else None)
                work = attempt.launch_fence(bucket.flat, self._memory.fence)
        except Exception as error:  # noqa: BLE001 (whatever it is, it must not leave backward)
            attempt.fail(error)
            work = None
        if work is None:
            self._break()
            return
        self._works.append(work)
        self._next = index + 1

    def _break(self) -> None:
        self._broken = True
        self._reduction.scale = None

    def _end_of_backward(self) -> None:
        """Runs when the graph task of the reduction's first hook ends."""
        if not self._open or self._deferred:
            return
        unfinished = self._next < self._bucket_count and not self._broken
        if unfinished and not self._opened_by_output and is_nested_backward():
            self._deferred = True
            self._reduction.scale = None
            self.watches_outputs = True
            return
        self.buffers.gone_through(self._arrived)
        # Only under create_graph does the engine leave it on here; asking costs a twentieth of no_grad.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            self._fill(with_accumulated=True)
            self._finish()
        self._consumed = True

    def _open_outer(self, _gradient: Tensor) -> None:
        if self._reduction.scale is None and self._begin():
            self._opened_by_output = True

    def _fill(self, *, with_accumulated: bool) -> None:
        """Complete and launch the buckets that lack gradients."""
        for bucket in self._buckets[self._next :]:
            if self._broken:
                return
            if bucket.pending:
                for index in bucket.parameters:
                    if not self._arrived[index]:
                        self._fill_one(index, with_accumulated)
                bucket.pending = 0
            self._advance()

    def _fill_one(self, index: int, with_accumulated: bool) -> None:
        parameter, view = self._memory.parameters[index], self._views[index]
        if not with_accumulated or parameter.grad is None:
            view.zero_()
            if with_accumulated and self._scale_value and self._memory.used is None:
                self._memory.tell_unused(self._name(index))
        else:
            # Used earlier, under no_sync, but not in this backward: its gradient counts as well.
            self._arrived[index] = 1
            if self._reduction.scale is _NOT_CONTRIBUTING:
                view.zero_()
            else:
                torch.mul(parameter.grad.detach(), self._scale_tensor, out=view)
        parameter.grad = view

    def _finish(self) -> None:
        """Wait for the reduction's works and close it."""
        attempt = self._attempt
        assert attempt is not None
        self._wait(attempt)
        self._open = self._deferred = False
        self._reduction.scale = None
        self._settled = attempt
        if self._broken:
            return
        memory = self._memory
        asks = memory.used is not None and (not self._scale_value or 0 in self._arrived)  # else it used them all
        try:
            fence, used = memory.in_told(attempt.read(memory.told) if asks or attempt.rides else memory.told)
            if asks:
                memory.forget_unused(used)
            attempt.fence_arrived(fence)
        except Exception as error:  # noqa: BLE001 (backward must not raise; the attempt decides what it means)
            attempt.fail(error)
            self._broken = True

    def _wait(self, attempt: ReductionAttempt) -> None:
        for work in self._works:
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 (any failed collective breaks the attempt, none the process)
                if not self._broken:
                    self._break()
                    # First the report, so that the Manager's abort ends the works that are waited for next.
                    attempt.fail(error)
        self._works.clear()

    def _abandon(self) -> None:
        """A backward raised in the middle, so no callback came: keep the collectives aligned, veto the step."""
        attempt = self._attempt
        assert attempt is not None
        attempt.report(UsageError("backward() ended before all gradients of this step were there"))
        self._fill(with_accumulated=False)
        self._finish()

    def _drop_unfinished(self) -> None:
        """Before a forward: the last backward raised in a reduction. If nobody saw it, it never was."""
        if self._works or self._broken:
            with torch.no_grad():
                self._abandon()
        else:
            self._open, self._reduction.scale = False, None

    # ------------------------------------------------------------------------------------------ rare gradients, errors

    def _copy_special(self, index: int, scale: Tensor, error: RuntimeError) -> None:
        mistake = copy_special(self._memory.parameters[index], self._views[index], scale, self._name(index))
        if mistake is not None:
            self._reject(mistake, error)

    def _reject(self, mistake: Exception, cause: BaseException | None) -> None:
        assert self._attempt is not None
        self._attempt.fail(mistake)
        self._break()
        raise mistake from cause

    def _name(self, index: int) -> str:
        return self._plan.trained[index].name

    # ----------------------------------------------------------------------------- GradientReducer: called by Manager

    def flush(self, *, with_accumulated: bool = False) -> None:
        """Launch whatever the current attempt lacks, with zeros, fence included, and wait. Never raises.

        `with_accumulated`: an attempt without any reduction reduces the gradients that are there, instead of zeros.
        """
        attempt = self._manager.current_attempt()
        if attempt is None or (attempt is self._settled and not self._open):
            return  # the usual case, before a context is entered for nothing
        try:
            with torch.no_grad():
                self._flush(attempt, with_accumulated)
        except Exception as error:  # noqa: BLE001 (a vote must always be possible; the attempt carries the reason)
            attempt.fail(error)

    def _flush(self, attempt: ReductionAttempt, with_accumulated: bool) -> None:
        if self._open:
            # A backward that raised; or a deferred one (see `_end_of_backward`), whose gradients may have been used
            # before they were reduced. The latter happens once: from then on outputs are watched.
            self._abandon()
        if self._settled is not attempt and self._start(attempt):
            self._fill(with_accumulated=with_accumulated)
            self._finish()

    def rescale(self, factor: float) -> None:
        """Multiply the reduced gradients; a gradient that was replaced by the caller is multiplied too."""
        self._memory.rescale(factor)

    def step_opens(self) -> None:
        """Collecting the state changes nothing here."""

    def committed(self) -> None:
        """The attempt was committed: buffers take what came with the fence."""
        self._settled = None
        self.buffers.unpack()

    def vetoed(self) -> None:
        """The attempt was not committed: buffers go back to before the first forward since the last verdict."""
        self._settled = None
        self.buffers.restore()

    def state_loaded(self) -> None:
        """State was written into the module: what `vetoed` would restore is void."""
        self.buffers.forget()

    def buffer_storages(self) -> set[int]:
        """Addresses of the storages of all buffers, synced or not, as they are now."""
        return {buffer.untyped_storage().data_ptr() for buffer in self._module.buffers()}
