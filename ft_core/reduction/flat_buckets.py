"""Flat gradient memory: one tensor per bucket, a view of it per parameter, and what can be done with a reduced whole.

Invariants: the view of a parameter has its dtype and shape, and its strides if it fills its memory.
Threads: see `bucket_reducer`, which owns this memory; nothing here is called while a collective may use it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ft_core.reduction.c_heap import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.reduction.bucket_plan import BucketPlan, PlannedBucket
    from ft_core.reduction.interface import Parameter


log = logging.getLogger("ft_core")


class Bucket:
    """One flat tensor, and how many of its gradients this reduction still lacks."""

    __slots__ = ("flat", "gradients", "parameters", "pending")

    def __init__(self, plan: PlannedBucket, device: torch.device, flat: Tensor | None = None) -> None:
        self.parameters = [member.parameter for member in plan.members]
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.flat = (
                torch.zeros(plan.numel, dtype=getattr(torch, plan.dtype), device=device) if flat is None else flat
            )
            self.gradients = self.flat[: plan.gradients]
        self.pending = len(self.parameters)


class FlatGradients:
    """The buckets of one module. `parameters` in the order of `plan.trained`, `devices` by the plan's numbers.

    `flats`: the memory of each bucket, where it is not to be made here.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[Parameter], devices: Sequence[torch.device],
        flats: Sequence[Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        keep_freed_memory()
        self.parameters = list(parameters)
        given = flats or [None] * len(plan.buckets)
        self.buckets = [
            Bucket(planned, devices[planned.device], flat) for planned, flat in zip(plan.buckets, given, strict=True)
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
            self.used.copy_(arrived)

    def tell_unused(self, name: str) -> None:
        """Without find_unused: this parameter got no gradient from the first backward that had to bring one."""
        if not self._told_unused:
            self._told_unused = True
            log.warning(
                "parameter %s got no gradient in a backward(), although find_unused_parameters=False says that all "
                "are used: its gradient is zeros, and weight decay or momentum still move it; leave the argument out, "
                "on all replicas, and it stays None (said once)", name
            )  # fmt: skip

    def forget_unused(self) -> None:
        """With find_unused: a gradient that no participant has is None, also here."""
        if self.used is not None:
            for index in (self.used == 0).nonzero().flatten().tolist():
                self.parameters[index].grad = None


def dense_strides(tensor: Parameter | Tensor) -> tuple[int, ...] | None:
    """Strides of a tensor that fills its memory in another order than row by row (channels_last); else None."""
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def _view_like(parameter: Parameter, flat: Tensor, offset: int, numel: int) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        part = flat[offset : offset + numel]
        if parameter.is_complex():
            part = part.view(parameter.dtype)
        if dense_strides(parameter) is not None:
            return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        return part.view(parameter.shape)
