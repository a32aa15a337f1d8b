"""What state needs of a device whose memory the CPU does not reach: pinned memory, copies beside training, events.

How it works. A `Device` copies on a stream of its own, which waits for a mark (as of `ft_core.device`) and for nothing
else, so neither does training wait for a copy nor a copy for what training launches later. `device_of` is how
everything here finds the device of a tensor; None means memory that is served from where it lies. CUDA's is the only
one there is: a thin shell without decisions. Everything else is tested with a device that lies in CPU memory
(`tests/fake_device.py`).

Invariants: what `copy` was given is not freed for other uses before its copy has ended; bytes that were copied may be
looked at once the mark that `copy` returned has been reached, not before.

Threads: any.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

import torch

from ft_core.device import Accelerator, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

POLL_FIRST_S: Final = 0.000_02
POLL_LAST_S: Final = 0.001
"""How often an event is looked at: it must end at a deadline, which a blocking synchronize does not."""


class Device(Protocol):
    """See the file's header. What fails raises RuntimeError."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """New host memory (uint8) that the device copies to and from by itself."""
        ...

    def mark(self) -> Mark:
        """The end of all that the calling thread has launched on this device."""
        ...

    def follow(self, mark: Mark) -> None:
        """What the calling thread launches on this device from now on comes after `mark`."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        """Begin to copy bytes (uint8, one side pinned memory) once `after` is reached; the end of it."""
        ...


def byte_slice(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes of a contiguous tensor, wherever it lies."""
    return tensor.detach().reshape(-1).view(torch.uint8)[start:stop]


def is_reached(mark: Mark) -> bool:
    """Whether the device has come to the mark; also where it has failed."""
    try:
        return mark.query()
    except RuntimeError:
        return True


def wait_for(mark: Mark, timeout_s: float) -> bool:
    """Block until the device has come to the mark; False: not within that time. Raises RuntimeError: it has failed."""
    end, pause_s = time.monotonic() + timeout_s, POLL_FIRST_S
    while not mark.query():
        if time.monotonic() >= end:
            return False
        time.sleep(pause_s)
        pause_s = min(POLL_LAST_S, pause_s * 1.2)
    return True


class All:
    """A mark that is reached when all of several are, or have failed: nothing is copied any more."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self._marks = tuple(marks)

    def __repr__(self) -> str:
        return f"All({len(self._marks)} marks)"

    def query(self) -> bool:
        """Whether they are."""
        return all(is_reached(mark) for mark in self._marks)


class CudaDevice:
    """One CUDA device, with a stream for copies that begin there and one for those that end there."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._memory = Accelerator(torch.device("cuda", index))
        # Of the high priority: those of the other one are handed out in turns, 32 per device, also to each new NCCL
        # group. A copy on the stream of a collective would wait for a peer, which may be waiting for this very copy.
        self._out, self._in = (torch.cuda.Stream(index, priority=-1) for _ in range(2))

    def __repr__(self) -> str:
        return f"CudaDevice({self._index})"

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        """An event on the calling thread's current stream."""
        return self._memory.mark()

    def follow(self, mark: Mark) -> None:
        """Have that stream wait for the event."""
        torch.cuda.current_stream(self._index).wait_event(mark)  # type: ignore[arg-type]  # as in `copy`

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        """On the stream for that direction."""
        stream, here = (self._in, target) if target.is_cuda else (self._out, source)
        # The device first: on a thread that has none, leaving the stream would make device 0 current, and use it.
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)  # type: ignore[arg-type]  # a mark of this device is an event
            target.copy_(source, non_blocking=True)
            here.record_stream(stream)
            return self._memory.mark()


_cuda: dict[int, CudaDevice] = {}  # at most as many as the machine has
_lock = threading.Lock()


def _cuda_device_of(tensor: torch.Tensor) -> Device | None:
    return _cuda_device(tensor.device.index) if tensor.is_cuda else None


def _cuda_device(index: int) -> CudaDevice:
    with _lock:
        if index not in _cuda:
            _cuda[index] = CudaDevice(index)
        return _cuda[index]


device_of: Callable[[torch.Tensor], Device | None] = _cuda_device_of
"""The device that copies this tensor's memory; None: the CPU reaches it, or no device here knows how."""
