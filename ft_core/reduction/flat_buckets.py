"""Flat gradient memory: one tensor per bucket, a view of it per parameter, and what can be done with a reduced whole.

On a device, gradients of one bucket may be written on several streams: autograd computes a gradient on the stream of
its forward, FSDP2 on one of its own. A bucket keeps these, and whoever launches its collective waits for them in order.

Invariants: the view of a parameter has its dtype and shape, and its strides if it fills its memory.
Threads: see `bucket_reducer`, which owns this memory; nothing here is called while a collective may use it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ft_core.device import device_of as _device_of
from ft_core.errors import ConfigError, UsageError
from ft_core.reduction.c_heap import keep_freed_memory
from ft_core.strides import dense_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.device import Device, Stream
    from ft_core.reduction.bucket_plan import BucketPlan, PlannedBucket
    from ft_core.reduction.interface import Parameter


log = logging.getLogger("ft_core")


class Bucket:
    """One flat tensor, and how many of its gradients this reduction still lacks."""

    __slots__ = ("_streams", "device", "flat", "gradients", "parameters", "pending")

    def __init__(
        self, plan: PlannedBucket, device: torch.device, flat: Tensor | None = None,
        device_of: Callable[[torch.device], Device] = _device_of,
    ) -> None:  # fmt: skip
        self.parameters = [member.parameter for member in plan.members]
        self.device = device_of(device)
        self._streams: dict[int, Stream] = {}
        """By number, on which gradients were written since the last `join_streams`; none where all is immediate."""
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.flat = (
                torch.zeros(plan.numel, dtype=getattr(torch, plan.dtype), device=device) if flat is None else flat
            )
            self.gradients = self.flat[: plan.gradients]
        self.pending = len(self.parameters)

    def on_stream(self, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """The hook of a gradient that is written into it: it also says on which stream."""
        if self.device.immediate:
            return hook
        device, streams, number_of = self.device, self._streams, self.device.stream_number

        def on_gradient(parameter: Tensor) -> None:
            number = number_of()
            if number not in streams:
                streams[number] = device.current_stream()
            hook(parameter)

        return on_gradient

    def join_streams(self) -> None:
        """What is queued on the current stream from now on runs after all that wrote to this bucket."""
        if self._streams:
            current = self.device.current_stream()
            for stream in self._streams.values():
                if stream != current:
                    current.wait_stream(stream)
            self._streams.clear()


class FlatGradients:
    """The buckets of one module. `parameters` in the order of `plan.trained`, `devices` by the plan's numbers.

    `flats`: the memory of each bucket, where it is not to be made here. `device_of`: what is needed of each device.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[Parameter], devices: Sequence[torch.device],
        flats: Sequence[Tensor | None] | None = None, device_of: Callable[[torch.device], Device] = _device_of,
    ) -> None:  # fmt: skip
        keep_freed_memory()
        self.parameters = list(parameters)
        given = flats or [None] * len(plan.buckets)
        self.buckets = [
            Bucket(planned, devices[planned.device], flat, device_of)
            for planned, flat in zip(plan.buckets, given, strict=True)
        ]
        self.views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self.bucket_of: list[Bucket] = [self.buckets[0]] * len(self.parameters)
        for planned, bucket in zip(plan.buckets, self.buckets, strict=True):
            for member in planned.members:
                parameter = self.parameters[member.parameter]
                self.views[member.parameter] = _view_like(parameter, bucket.flat, member.offset, member.numel)
                self.bucket_of[member.parameter] = bucket
        tail, last = plan.tail, self.buckets[-1].flat
        with torch.inference_mode(False):
            self.fence = last[tail.fence : tail.fence + tail.fence_slots]
            self.used = last[tail.used : tail.used + tail.used_numel] if tail.used_numel else None
            """With find_unused: how many participants used each parameter."""
            self.told = last[tail.fence : tail.used + tail.used_numel]
            """Both: what the host reads when they are summed."""
        self._told_unused = False

    def rescale(self, factor: float) -> None:
        """Multiply all gradients, also those the caller replaced by tensors of its own."""
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.gradients.mul_(factor)
            for parameter, view in zip(self.parameters, self.views, strict=True):
                if parameter.grad is not None and parameter.grad is not view:
                    parameter.grad.mul_(factor)

    def pack_used(self, arrived: Tensor | None) -> None:
        """With find_unused: mark which gradients this member has; None: it does not contribute."""
        if self.used is None:
            return
        if arrived is None:
            self.used.zero_()
        else:
            self.buckets[-1].device.put(arrived, self.used)

    def in_told(self, told: Tensor) -> tuple[Tensor, Tensor | None]:
        """The fence, and `used`, in a copy of `self.told` (or in itself)."""
        if told is self.told:
            return self.fence, self.used
        slots = self.fence.numel()
        return told[:slots], None if self.used is None else told[slots:]

    def tell_unused(self, name: str) -> None:
        """Without find_unused: this parameter got no gradient from the first backward that had to bring one."""
        if not self._told_unused:
            self._told_unused = True
            log.warning(
                "parameter %s got no gradient in a backward(), although find_unused_parameters=False says that all "
                "are used: its gradient is zeros, and weight decay or momentum still move it; leave the argument out, "
                "on all replicas, and it stays None (said once)", name
            )  # fmt: skip

    def forget_unused(self, used: Tensor | None) -> None:
        """With find_unused: a gradient that no participant has is None, also here. `used`, in CPU memory."""
        if used is not None:
            for index in (used == 0).nonzero().flatten().tolist():
                self.parameters[index].grad = None


def copy_special(parameter: Parameter, view: Tensor, scale: Tensor, name: str) -> Exception | None:
    """Copy a gradient that the fast path refused: one with a graph of its own (create_graph).

    Returns the caller's mistake, if it is one: a gradient that does not fit its bucket.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        return ConfigError(f"parameter {name} has a sparse gradient; only dense ones can be reduced")
    if gradient.requires_grad and gradient.dtype == view.dtype and gradient.device == view.device:
        with torch.no_grad():
            torch.mul(gradient, scale, out=view)
        parameter.grad = view
        return None
    have, want = (f"{t.dtype} {list(t.shape)} on {t.device}" for t in (gradient, view))
    return UsageError(
        f"the gradient of {name} is {have}, its bucket {want}: wrap the module after moving or casting it"
    )


def _view_like(parameter: Parameter, flat: Tensor, offset: int, numel: int) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        part = flat[offset : offset + numel]
        if parameter.is_complex():
            part = part.view(parameter.dtype)
        if dense_strides(parameter) is not None:
            return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        return part.view(parameter.shape)
