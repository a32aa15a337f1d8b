"""Buffers of a wrapped module (BatchNorm's statistics and the like): saved, carried by the fence, written back.

Forward changes them on every replica differently, so at each commit all members take those of the source (the first
participant), and after a veto each gets back what it had before the step. They travel in the tail of the last bucket,
which is summed: the source puts in its values, everybody else what leaves a sum unchanged bit for bit. For float32
that is -0.0 (0.0 would turn the source's -0.0 into 0.0); all other dtypes are cut into 16-bit pieces, which are exact
as float32, and 0 is neutral.

Invariants: `save` keeps the oldest values since the last verdict, so a veto after several forwards (or after a step
that was never voted on) returns to the committed state. A buffer is looked up by its owner each time, because modules
may replace the tensor; its shape and dtype may not change.
Threads: pack runs on the thread that runs backward, everything else on the training thread, never at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ft_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.layout import Layout


class BufferCarriage:
    """The buffers of one module and their places in the tail `flat`. Constructed without buffers it does nothing."""

    def __init__(self, owners: Sequence[tuple[nn.Module, str]], layout: Layout, flat: Tensor) -> None:
        self._owners = list(owners)
        self._specs = layout.buffers
        self._saved: list[Tensor] = []
        self._is_saved = False
        self.empty = not self._owners
        if self.empty:
            return
        tail = layout.tail
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
        """Before a forward: remember the buffers, if they were not remembered since the last verdict."""
        if self._is_saved or self.empty:
            return
        buffers = self._current()
        with torch.no_grad():
            torch._foreach_copy_(self._saved, buffers)
        self._is_saved = True

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
            buffers = self._current()
            if self._direct:
                torch._foreach_copy_([buffers[index] for index in self._direct], self._direct_views)
            if self._staged:
                self._staging.copy_(self._pieces)
                torch._foreach_copy_([buffers[index] for index in self._staged], self._staged_views)

    def restore(self) -> None:
        """Give the buffers the values saved since the last verdict; the step is over."""
        if self._is_saved:
            with torch.no_grad():
                torch._foreach_copy_(self._current(), self._saved)
        self._is_saved = False

    def _current(self) -> list[Tensor]:
        buffers = []
        for (owner, key), spec in zip(self._owners, self._specs, strict=True):
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
