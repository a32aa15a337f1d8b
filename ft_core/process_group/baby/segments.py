"""`SegmentPool`: shared memory that carries tensors to a child process and back; `SegmentViews`: the child's side.

How it works. A segment is a memory file without a name (memfd): it needs no /dev/shm, which is small in containers, and
vanishes with the last process that has it, however that ends. One segment holds all tensors of one collective. Freed
segments are kept for the next collective of about that size, because the kernel fills new memory with zeros first.
The child maps a segment when it first meets its number, and unmaps it when the parent has dropped it.

Invariants: sizes are powers of two, from MIN_BYTES on. What is kept idle is bounded by MAX_IDLE_BYTES and
MAX_IDLE_SEGMENTS; what is in use, by the tensors of collectives in flight, which are themselves bounded in number
(`MAX_IN_FLIGHT`). A segment that a living child may still write to is never given back.
Threads: a SegmentPool from any; a SegmentViews from its process's main thread.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque

import torch

from ft_core.errors import ThisMachineError

MIN_BYTES = 64 * 1024
MAX_IDLE_BYTES = 1024**3
"""Kept for the next collectives by one process group. Beyond that a step allocates anew, which costs 0.3 s per GB."""
MAX_IDLE_SEGMENTS = 256
ALIGN_BYTES = 64
"""Each tensor in a segment begins at a multiple of this."""


class Segment:
    """A piece of shared memory: its number, and its bytes as a tensor."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.fd = -1
        try:
            self.fd = os.memfd_create("ft-baby", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size_bytes)
            self.memory = torch.frombuffer(mmap.mmap(self.fd, size_bytes), dtype=torch.uint8)
        except OSError as error:
            self.close()
            raise ThisMachineError(f"no shared memory of {size_bytes} bytes for a collective: {error}") from error

    def __repr__(self) -> str:
        return f"Segment({self.number}, {self.size_bytes} bytes)"

    def close(self) -> None:
        """Let go of it; the memory goes with the last tensor that lies in it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SegmentPool:
    """The segments of one process group; see the file's header."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: deque[Segment] = deque()
        self._last_number = 0
        self._existing: set[int] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"SegmentPool({len(self._idle)} idle, {self.idle_bytes} bytes)"

    @property
    def idle_bytes(self) -> int:
        """How much memory it keeps for later."""
        return sum(segment.size_bytes for segment in list(self._idle))

    def take(self, size_bytes: int) -> Segment:
        """Return a segment of at least that size, the taker's own. Raises ThisMachineError if there is no memory."""
        rounded = max(MIN_BYTES, 1 << (max(1, size_bytes) - 1).bit_length())
        with self._lock:
            for segment in self._idle:
                if segment.size_bytes == rounded:
                    self._idle.remove(segment)
                    return segment
            self._last_number += 1
            number = self._last_number
            self._existing.add(number)
        return Segment(number, rounded)

    def give_back(self, segment: Segment) -> None:
        """Take back what nobody writes to any more."""
        with self._lock:
            over = [segment]
            if not self._closed:
                self._idle.append(segment)
                over = []
                while len(self._idle) > MAX_IDLE_SEGMENTS or self.idle_bytes > MAX_IDLE_BYTES:
                    over.append(self._idle.popleft())
            self._existing.difference_update(old.number for old in over)
        for old in over:
            old.close()

    def drop(self, segment: Segment) -> None:
        """Let go of a segment that a process may still write to."""
        with self._lock:
            self._existing.discard(segment.number)
        segment.close()

    def gone(self, known: set[int]) -> list[int]:
        """Return which of the segments in `known` exist no more, and remove them there."""
        with self._lock:
            gone = known - self._existing
        known -= gone
        return list(gone)

    def close(self) -> None:
        """Let go of all that is idle, and of the rest when it comes back."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
        for segment in idle:
            segment.close()


class SegmentViews:
    """What a child process has mapped of its parent's segments."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"SegmentViews({len(self._memory)})"

    def add(self, number: int, fd: int, size_bytes: int) -> None:
        """Map the segment of this number; closes `fd`."""
        try:
            self._memory[number] = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        finally:
            os.close(fd)

    def forget(self, number: int) -> None:
        """Unmap it, once no tensor lies in it any more."""
        self._memory.pop(number, None)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._memory[number]
