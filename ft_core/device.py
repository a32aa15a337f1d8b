"""What the step needs of the memory that its tensors are in: small copies and an event, none of which blocks the host.

How it works. On an accelerator the host only queues work on streams; it learns that the work is done from an event,
which it asks now and then. Numbers go to the device, and come back, through pinned memory: a copy from or to any other
memory blocks the host until the stream has come so far, and for good if a collective before it waits for a dead peer.
`HostMemory` is the same for tensors of the CPU: what returns is done.

Making pinned memory may wait for the whole device, and so for a collective that hangs. torch keeps what is let go, in
sizes that are powers of two, and hands it out again without a call of the driver's. So a reducer reserves what its
copies will need when it is made, before any collective: that many pieces of each size are made at once, and let go.

Invariants: nothing here blocks but `reserve`. What `fetch` returned may be read once a mark that was made later has
been reached. Pinned memory that is let go is used again only after the copy it was for: torch's allocator sees to it.
Threads: any; the current stream is the calling thread's.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HOST", "Accelerator", "Device", "HostMemory", "Mark", "Stream", "device_of"]


RESERVED = 4
"""Pieces of each size that a reducer may have in use at once: a ballot, which parameters were used, what is told, and
one of a step that was given up and whose stream has not come so far."""
RESERVED_MOST = 64
"""Pieces of each size at most, however many reducers there are: they do not reduce all at once."""
RESERVED_LEAST_BYTES = 4096
"""Up to this size there are pieces in any case: for a script's few numbers."""


class Mark(Protocol):
    """A place in a stream; torch's events are such."""

    def query(self) -> bool:
        """Whether the stream has come so far. Raises what the device reports."""
        ...


class Stream(Protocol):
    """A queue of a device; torch's streams are such. Two are equal if they are the same queue."""

    def wait_stream(self, stream: Any) -> None:
        """What is queued here from now on runs after what was queued on `stream` until now."""
        ...


class Device(Protocol):
    """The memory of one device."""

    @property
    def immediate(self) -> bool:
        """Operations on its tensors are done when they return: there is nothing to wait for, and one stream."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Have memory for what one more user puts and fetches, each of at most `nbytes`; before collectives run."""
        ...

    def put(self, numbers: Tensor, into: Tensor) -> None:
        """Copy `numbers`, which are in CPU memory and may be changed afterwards, `into` a tensor of this device."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """Begin to copy `tensor`, of this device, into CPU memory, which is returned."""
        ...

    def mark(self) -> Mark:
        """Mark the place that the current stream has been queued to."""
        ...

    def current_stream(self) -> Stream:
        """The stream that this thread queues on."""
        ...

    def stream_number(self) -> int:
        """A number that no other stream of the device has: asking for it costs a tenth of asking for the stream."""
        ...


class _Reached:
    """A mark, and a stream, of what is done at once."""

    def __repr__(self) -> str:
        return "_Reached()"

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        """Nothing is queued."""


_REACHED = _Reached()


class HostMemory:
    """The memory of the CPU."""

    immediate = True

    def __repr__(self) -> str:
        return "HostMemory()"

    def reserve(self, nbytes: int) -> None:
        """Nothing: no memory is in between."""

    def put(self, numbers: Tensor, into: Tensor) -> None:
        """Copy it."""
        into.copy_(numbers)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return it: it is there."""
        return tensor

    def mark(self) -> Mark:
        """Return one that has been reached."""
        return _REACHED

    def current_stream(self) -> Stream:
        """Return the only one."""
        return _REACHED

    def stream_number(self) -> int:
        """Return that of the only one."""
        return 0


class Accelerator:
    """The memory of a GPU, or of another accelerator that torch has a module for (`torch.cuda`, `torch.xpu`)."""

    immediate = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._raw_stream = _raw_stream if device.type == "cuda" and device.index is not None else None
        self._lock = threading.Lock()
        self._pieces: Counter[int] = Counter()
        """By size, how many were reserved."""

    def __repr__(self) -> str:
        return f"Accelerator({self._device})"

    def reserve(self, nbytes: int) -> None:
        """Have torch keep pinned memory of each size. Blocks."""
        largest = max(nbytes, RESERVED_LEAST_BYTES)
        with self._lock:
            for size in sizes_up_to(largest):
                self._pieces[size] = min(RESERVED_MOST, self._pieces[size] + RESERVED)
            # All at once: a piece that is let go before the next is made would be that one.
            pieces = [self._pinned(size) for size, count in self._pieces.items() for _ in range(count)]
        del pieces

    def _pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def put(self, numbers: Tensor, into: Tensor) -> None:
        """Copy through pinned memory, in the order of the current stream."""
        staged = torch.empty(numbers.shape, dtype=into.dtype, pin_memory=True).copy_(numbers)
        into.copy_(staged, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Queue a copy into pinned memory on the current stream."""
        numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return numbers.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        event: Mark = self._module.Event()
        event.record(self._module.current_stream(self._device))  # type: ignore[attr-defined]
        return event

    def current_stream(self) -> Stream:
        """Return this thread's stream of the device."""
        stream: Stream = self._module.current_stream(self._device)
        return stream

    def stream_number(self) -> int:
        """Return its address where torch tells that in one call (CUDA), else its own number of it."""
        if self._raw_stream is not None:
            number: int = self._raw_stream(self._device.index)
            return number
        return int(self._module.current_stream(self._device).stream_id)


def sizes_up_to(nbytes: int) -> list[int]:
    """The sizes of torch's pieces of pinned memory for at most so many bytes: powers of two."""
    return [1 << power for power in range((max(nbytes, 1) - 1).bit_length() + 1)]


HOST = HostMemory()
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""What torch's compiler asks before each kernel."""


@functools.lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """The memory that tensors of `device` are in."""
    return HOST if device.type == "cpu" else Accelerator(device)
