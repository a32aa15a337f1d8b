"""Buffers of a wrapped module (BatchNorm's statistics and the like): saved, carried by the fence, written back.

Forward changes them on every replica differently, so at each commit all members take those of the source (the first
participant), and after a veto each gets back what it had before the step. They travel in the tail of the last bucket,
which is summed: the source puts in its values, everybody else what leaves a sum unchanged bit for bit. For float32
that is -0.0 (0.0 would turn the source's -0.0 into 0.0); all other dtypes are cut into 16-bit pieces, which are exact
as float32, and 0 is neutral.

A graph that was recorded and not gone through yet may need the buffers as its forward had them: a GAN's generator,
while its discriminator makes a step. Autograd refuses to go on where one was written to. So where a graph may be open
at a verdict, the module gets new tensors with the values of the verdict, and the graph keeps the old ones. Before the
module's next forward the old tensors are given those values and are put back, as whoever holds on to a buffer expects.
torch's DDP, too, writes to buffers before forward only. A graph is over when all trained parameters have got a
gradient since the last forward.

Invariants: `save` keeps the oldest values since the last verdict, so a veto after several forwards (or after a step
that was never voted on) returns to the committed state. After a verdict the module's buffers have its values, whatever
is open. A buffer is looked up by its owner each time, because modules may replace the tensor; its shape and dtype may
not change. A stand-in that somebody replaced is not put back.
Threads: pack runs on the thread that runs backward, everything else on the training thread, never at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ft_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.reduction.bucket_plan import BucketPlan

    Owners = Sequence[list[tuple[nn.Module, str]]]


class BufferSync:
    """The buffers of one module and their places in the tail `flat`. Constructed without buffers it does nothing."""

    def __init__(self, owners: Sequence[list[tuple[nn.Module, str]]], plan: BucketPlan, flat: Tensor) -> None:
        self._owners = list(owners)
        self._specs = plan.buffers
        self._saved: list[Tensor] = []
        self._is_saved = False
        self._away: list[tuple[list[tuple[nn.Module, str]], Tensor, Tensor]] = []
        """The buffers that a graph may need: each one's owners, itself, and what stands in for it."""
        self._graph_is_open = False
        self._arrived, self._everybody = 0, (1 << 8 * len(plan.trained)) // 255
        """Parameters with a gradient since the last forward, and all of them: 1 in a byte each."""
        self.empty = not self._owners
        if self.empty:
            return
        tail = plan.tail
        buffers = self._current()
        self._saved = [torch.empty_like(buffer) for buffer in buffers]
        self._direct = [index for index, _ in tail.buffers]
        first = tail.used + tail.used_numel
        self._direct_region = flat[first : tail.pieces]
        self._direct_views = [
            flat[offset : offset + buffers[index].numel()].view(buffers[index].shape) for index, offset in tail.buffers
        ]
        self._staged = [index for index, _ in tail.staged]
        self._pieces = flat[tail.pieces : tail.end]
        staging = torch.zeros(tail.pieces_numel * 2, dtype=torch.uint8, device=flat.device)
        self._staging = staging.view(torch.int16)
        self._staged_views = []
        for index, offset in tail.staged:
            buffer = buffers[index]
            nbytes = buffer.numel() * buffer.element_size()
            self._staged_views.append(staging[offset : offset + nbytes].view(buffer.dtype).view(buffer.shape))

    def save(self) -> None:
        """Before a forward that records a graph: remember the buffers, if they were not since the last verdict."""
        if self.empty:
            return
        self.put_back()
        self._graph_is_open, self._arrived = True, 0
        if self._is_saved:
            return
        buffers = self._current()
        with torch.no_grad():
            torch._foreach_copy_(self._saved, buffers)
        self._is_saved = True

    def put_back(self) -> None:
        """Before any forward: the module has its own tensors again, with the values of those that stood in."""
        away, self._away = self._away, []
        with torch.no_grad():
            for owners, own, stand_in in away:
                own.copy_(stand_in)
                for owner, key in owners:
                    if owner._buffers.get(key) is stand_in:
                        owner._buffers[key] = own

    def gone_through(self, arrived: bytes | bytearray) -> None:
        """A backward has ended. `arrived`: 1 for each trained parameter that has got its gradient in it."""
        if self._graph_is_open:
            self._arrived |= int.from_bytes(arrived, "little")
            self._graph_is_open = self._arrived != self._everybody

    def forget(self) -> None:
        """What was saved is no longer what a veto should restore."""
        self._is_saved = False

    def pack(self, *, source: bool) -> None:
        """Fill the tail with this member's contribution."""
        if self.empty:
            return
        with torch.no_grad():
            if not source:
                self._direct_region.fill_(-0.0)
                self._pieces.zero_()
                return
            buffers = self._current()
            if self._direct:
                torch._foreach_copy_(self._direct_views, [buffers[index] for index in self._direct])
            if self._staged:
                torch._foreach_copy_(self._staged_views, [buffers[index] for index in self._staged])
                self._pieces.copy_(self._staging)

    def unpack(self) -> None:
        """Write what the tail holds into the module; the step is over."""
        self._is_saved = False
        if self.empty:
            return
        with torch.no_grad():
            buffers = self._writable()
            if self._direct:
                torch._foreach_copy_([buffers[index] for index in self._direct], self._direct_views)
            if self._staged:
                self._staging.copy_(self._pieces)
                torch._foreach_copy_([buffers[index] for index in self._staged], self._staged_views)

    def restore(self) -> None:
        """Give the buffers the values saved since the last verdict; the step is over."""
        if self._is_saved:
            with torch.no_grad():
                torch._foreach_copy_(self._writable(), self._saved)
        self._is_saved = False

    def _writable(self) -> list[Tensor]:
        """The module's buffers, to write to; where a graph may need them, others that stand in for them from now on."""
        buffers = self._current()
        if not self._graph_is_open or self._away:
            return buffers
        stand_ins = [torch.empty_like(buffer) for buffer in buffers]
        for owners, own, stand_in in zip(self._owners, buffers, stand_ins, strict=True):
            self._away.append((owners, own, stand_in))
            for owner, key in owners:
                if owner._buffers.get(key) is own:
                    owner._buffers[key] = stand_in
        return stand_ins

    def _current(self) -> list[Tensor]:
        buffers = []
        for ((owner, key), *_), spec in zip(self._owners, self._specs, strict=True):
            buffer = owner._buffers[key]
            if buffer is None or tuple(buffer.shape) != spec.shape or _dtype_name(buffer) != spec.dtype:
                found = "None" if buffer is None else f"{_dtype_name(buffer)} {list(buffer.shape)}"
                raise UsageError(
                    f"buffer {spec.name} was {spec.dtype} {list(spec.shape)} when the module was wrapped and is {found}"
                    " now; wrap the module again (ddp.unwrap()), or put its name into the module's"
                    " _ddp_params_and_buffers_to_ignore"
                )
            buffers.append(buffer)
        return buffers


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
