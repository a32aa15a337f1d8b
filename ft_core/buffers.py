"""Buffers of a wrapped module (BatchNorm's statistics and the like): saved, carried by the fence, written back.

Forward changes them on every replica differently, so at each commit all members take those of the source (the first
participant), and after a veto each gets back what it had before the step. They travel in the tail of the last bucket,
which is summed: the source puts in its values, everybody else what leaves a sum unchanged bit for bit. For float32
that is -0.0 (0.0 would turn the source's -0.0 into 0.0); all other dtypes are cut into 16-bit pieces, which are exact
as float32, and 0 is neutral.

A graph that was recorded and not gone through yet may need the buffers as its forward had them: a GAN's generator,
while its discriminator makes a step. Autograd refuses to go on where one was written to. So what a verdict says about
buffers is *due* where a graph may be open, and written before the module's next forward, as with torch's DDP. A graph
is over when all trained parameters have got a gradient since the last forward. What is due counts already: it is what
this member contributes, and what others receive.

Invariants: `save` keeps the oldest values since the last verdict, so a veto after several forwards (or after a step
that was never voted on) returns to the committed state. While something is due it is in `_saved`. A buffer is looked up
by its owner each time, because modules may replace the tensor; its shape and dtype may not change. Whoever writes to a
buffer of which something is due (load_state_dict) has the last word.
Threads: pack runs on the thread that runs backward, everything else on the training thread, never at the same time.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ft_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ft_core.layout import Layout


class BufferCarriage:
    """The buffers of one module and their places in the tail `flat`. Constructed without buffers it does nothing."""

    def __init__(self, owners: Sequence[tuple[nn.Module, str]], layout: Layout, flat: Tensor) -> None:
        self._owners = list(owners)
        self._specs = layout.buffers
        self._saved: list[Tensor] = []
        self._is_saved = False
        self._due: list[tuple[int, int]] | None = None
        """Not None: `_saved` has what the buffers are to be; which tensors these were then, in which version."""
        self._graph_is_open = False
        self._arrived, self._everybody = 0, (1 << 8 * len(layout.trained)) // 255
        """Parameters with a gradient since the last forward, and all of them: 1 in a byte each."""
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
        """Before a forward that records a graph: remember the buffers, if they were not since the last verdict."""
        if self.empty:
            return
        self._graph_is_open, self._arrived = True, 0
        if self._due is not None:
            self.settle()
            self._is_saved = True
        if self._is_saved:
            return
        buffers = self._current()
        with torch.no_grad():
            torch._foreach_copy_(self._saved, buffers)
        self._is_saved = True

    def settle(self) -> None:
        """Before any forward: write what is due."""
        if self._due is None:
            return
        buffers, theirs = self._current(), self._untouched()
        with torch.no_grad():
            for buffer, saved, due in zip(buffers, self._saved, theirs, strict=True):
                (buffer if due else saved).copy_(saved if due else buffer)
        self._due = None

    def gone_through(self, arrived: bytes | bytearray) -> None:
        """A backward has ended. `arrived`: 1 for each trained parameter that has got its gradient in it."""
        if self._graph_is_open:
            self._arrived |= int.from_bytes(arrived, "little")
            self._graph_is_open = self._arrived != self._everybody

    def forget(self) -> None:
        """State was loaded: what was saved is no longer what a veto should restore, and nothing is due."""
        self._is_saved, self._due = False, None

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
            due = self.due()
            buffers = [due.get(id(buffer), buffer) for buffer in buffers] if due else buffers
            if self._direct:
                torch._foreach_copy_(self._direct_views, [buffers[index] for index in self._direct])
            if self._staged:
                torch._foreach_copy_(self._staged_views, [buffers[index] for index in self._staged])
                self._pieces.copy_(self._staging)

    def unpack(self) -> None:
        """The step is over: write what the tail holds into the module, or make it due."""
        self._is_saved, self._due = False, None
        if self.empty:
            return
        with torch.no_grad():
            buffers = self._current()
            if self._graph_is_open:
                self._due = self._marks(buffers)
                buffers = self._saved
            if self._direct:
                torch._foreach_copy_([buffers[index] for index in self._direct], self._direct_views)
            if self._staged:
                self._staging.copy_(self._pieces)
                torch._foreach_copy_([buffers[index] for index in self._staged], self._staged_views)

    def restore(self) -> None:
        """The step is over: the buffers get, or are due, the values saved since the last verdict."""
        if self._is_saved and self._due is None:
            self._due = self._marks(self._current())
        self._is_saved = False
        if not self._graph_is_open:
            self.settle()

    def due(self) -> dict[int, Tensor]:
        """By id of a buffer: what is due for it. To write there changes what it will be."""
        if self._due is None:
            return {}
        both = zip(self._current(), self._saved, self._untouched(), strict=True)
        return {id(buffer): saved for buffer, saved, due in both if due}

    @contextlib.contextmanager
    def as_due(self) -> Iterator[None]:
        """Inside, the buffers have the values that are due; afterwards those that an open graph needs again."""
        due = self.due()
        if not due:
            yield
            return
        # Written through `data`: autograd does not count that, and the graph will find what it has left.
        written = [(buffer.data, due[id(buffer)]) for buffer in self._current() if id(buffer) in due]
        kept = [data.clone() for data, _ in written]
        with torch.no_grad():
            for data, saved in written:
                data.copy_(saved)
            try:
                yield
            finally:
                for (data, _), values in zip(written, kept, strict=True):
                    data.copy_(values)

    def _untouched(self) -> list[bool]:
        """Of each buffer, whether nobody has written to it or replaced it since something is due."""
        assert self._due is not None
        return [now == then for now, then in zip(self._marks(self._current()), self._due, strict=True)]

    @staticmethod
    def _marks(buffers: Sequence[Tensor]) -> list[tuple[int, int]]:
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]

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
