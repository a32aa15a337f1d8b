"""What state needs of a device whose memory the CPU does not reach: pinned memory, copies beside training, events.

How it works. A `Device` copies on a stream of its own, which waits for an event (`Moment`) and for nothing else, so
neither does training wait for a copy nor a copy for what training launches later. `device_of` is how everything here
finds the device of a tensor; None means memory that is served from where it lies. CUDA's is the only one there is: a
thin shell without decisions. Everything else is tested with a device that lies in CPU memory (`tests/fake_device.py`).

Invariants: what `copy` was given is not freed for other uses before its copy has ended; bytes that were copied may be
looked at once the moment that `copy` returned has been reached, not before.

Threads: any.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_FIRST_S: Final = 0.000_02
POLL_LAST_S: Final = 0.001
"""How often an event is looked at: it must end at a deadline, which a blocking synchronize does not."""


class Moment(Protocol):
    """A point in what a device was given to do."""

    def wait(self, timeout_s: float) -> bool:
        """Block until the device is there; False: not within that time. Raises RuntimeError: the device has failed."""
        ...

    @property
    def reached(self) -> bool:
        """Whether the device is there already; also where it has failed."""
        ...


class Device(Protocol):
    """See the file's header. What fails raises RuntimeError."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """New host memory (uint8) that the device copies to and from by itself."""
        ...

    def mark(self) -> Moment:
        """The end of all that the calling thread has launched on this device."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Moment | None) -> Moment:
        """Begin to copy bytes (uint8, one side pinned memory) once `after` is reached; the end of it."""
        ...


def byte_slice(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes of a contiguous tensor, wherever it lies."""
    return tensor.detach().reshape(-1).view(torch.uint8)[start:stop]


class CudaMoment:
    """An event of CUDA's."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def reached(self) -> bool:
        """Whether the event has happened."""
        try:
            return bool(self.event.query())
        except RuntimeError:
            return True

    def wait(self, timeout_s: float) -> bool:
        """Look at it again and again, at first in short intervals."""
        end, pause_s = time.monotonic() + timeout_s, POLL_FIRST_S
        while not self.event.query():
            if time.monotonic() >= end:
                return False
            time.sleep(pause_s)
            pause_s = min(POLL_LAST_S, pause_s * 1.2)
        return True


class CudaDevice:
    """One CUDA device, with a stream for copies that begin there and one for those that end there."""

    def __init__(self, index: int) -> None:
        self._index = index
        # Of the high priority: those of the other one are handed out in turns, 32 per device, also to each new NCCL
        # group. A copy on the stream of a collective would wait for a peer, which may be waiting for this very copy.
        self._out, self._in = (torch.cuda.Stream(index, priority=-1) for _ in range(2))

    def __repr__(self) -> str:
        return f"CudaDevice({self._index})"

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> CudaMoment:
        """An event on the calling thread's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return CudaMoment(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Moment | None) -> CudaMoment:
        """On the stream for that direction."""
        stream, here = (self._in, target) if target.is_cuda else (self._out, source)
        # The device first: on a thread that has none, leaving the stream would make device 0 current, and use it.
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            if after is not None:
                assert isinstance(after, CudaMoment)
                stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            here.record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        return CudaMoment(event)


_cuda: dict[int, CudaDevice] = {}  # at most as many as the machine has
_lock = threading.Lock()


def _cuda_device_of(tensor: torch.Tensor) -> Device | None:
    return _cuda_device(tensor.device.index) if tensor.is_cuda else None


def _cuda_device(index: int) -> CudaDevice:
    with _lock:
        if index not in _cuda:
            _cuda[index] = CudaDevice(index)
        return _cuda[index]


def _cuda_in_use() -> list[Device]:
    """The calling thread's current device, if CUDA is used at all."""
    return [_cuda_device(torch.cuda.current_device())] if torch.cuda.is_initialized() else []


device_of: Callable[[torch.Tensor], Device | None] = _cuda_device_of
"""The device that copies this tensor's memory; None: the CPU reaches it, or no device here knows how."""
in_use: Callable[[], list[Device]] = _cuda_in_use
"""Devices that the calling thread may have launched something on."""
