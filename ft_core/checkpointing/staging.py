"""Pinned host memory that state passes through on its way from and into device memory: little, and bounded.

How it works. State on a device travels range by range: one buffer is filled while another is sent (`Reading`), or
received into while another is copied to the device (`ReceivePlan.landing`). So a heal takes a few buffers of
`RANGE_BYTES` of the host, however large the state is. All are made at the first boundary at which there is state on a
device, before the first quorum, and then kept: making pinned memory may wait for the whole device, and so for a
collective that hangs. A buffer that a copy may still use is handed out again only once the copy has ended.

`mark` notes, on the training thread at a step's boundary, up to where the devices of the state have to be before it is
complete; copies wait for that, be it on streams of their own or on that of a thread that captures (`follow`), and no
training stream ever waits for a copy: what a donor was reading when its step went on is never confirmed to the receiver
(`offers`), so it does not matter what the optimizer does to it meanwhile.

Invariants: at most `buffers` exist at once. Who holds buffers and cannot get another one must be able to go on without.

Threads: any; `_changed` guards everything, and is not held while memory is made or copied.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from ft_core.checkpointing import devices
from ft_core.checkpointing.devices import All, is_reached, wait_for
from ft_core.checkpointing.ranges import RANGE_BYTES
from ft_core.checkpointing.tensor_bytes import byte_view
from ft_core.checkpointing.tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ft_core.checkpointing.devices import Device
    from ft_core.device import Mark

COPY_S: Final = 30.0
"""Longest that a buffer, or the end of a copy, is waited for: then the device hangs, and the transfer is given up."""
RECHECK_S: Final = 0.001


class Staging:
    """The buffers of one replica, and how far its devices were at the last boundary.

    Args:
        nbytes: bound of all buffers together; at least two are used.
    """

    def __init__(self, nbytes: int) -> None:
        self._most = max(2, nbytes // RANGE_BYTES)
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._copying: deque[tuple[Mark, torch.Tensor]] = deque()
        self._made = 0
        self._reserved = False
        self._marks: dict[Device, Mark] = {}  # at most one per device

    def __repr__(self) -> str:
        return f"Staging({self._made} of {self._most} buffers of {RANGE_BYTES} B, {len(self._free)} free)"

    def mark(self, state: object) -> None:
        """The state is complete when its devices have done what this thread has launched so far."""
        found = _devices(state)
        marks = {device: device.mark() for device in found}
        with self._changed:
            self._marks = marks
        if found and not self._reserved:
            self._reserved = True
            self._reserve(found[0])

    def follow(self, state: object) -> None:
        """What this thread copies on the devices of the state from now on is as of the boundary."""
        with self._changed:
            marks = dict(self._marks)
        for device in _devices(state):
            if device in marks:
                device.follow(marks[device])

    def boundary(self, device: Device) -> Mark:
        """What a copy from or to that device has to wait for."""
        with self._changed:
            mark = self._marks.get(device)
        return mark if mark is not None else device.mark()

    def _reserve(self, device: Device) -> None:
        """Make all buffers. What cannot be made now is tried again by whoever needs it, and told there."""
        buffers = []
        with contextlib.suppress(RuntimeError):
            while (buffer := self._new(device)) is not None:
                buffers.append(buffer)
        for buffer in buffers:
            self.give_back(buffer)

    def _new(self, device: Device) -> torch.Tensor | None:
        """One more buffer; None: there are all. Raises RuntimeError: the device cannot make it."""
        with self._changed:
            if self._made >= self._most:
                return None
            self._made += 1
        try:
            return device.pinned(RANGE_BYTES)
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify_all()
            raise

    def take(self, device: Device, within_s: float) -> torch.Tensor | None:
        """A buffer of RANGE_BYTES; None: there is none within that time."""
        end = time.monotonic() + within_s
        while True:
            with self._changed:
                self._sort_out()
                if self._free:
                    return self._free.pop()
                if self._made >= self._most:
                    left_s = end - time.monotonic()
                    if left_s <= 0:
                        return None
                    self._changed.wait(min(left_s, RECHECK_S) if self._copying else left_s)
                    continue
            buffer = self._new(device)
            if buffer is not None:  # else another thread has just made the last one
                return buffer

    def give_back(self, buffer: torch.Tensor, after: Mark | None = None) -> None:
        """The buffer is not needed any more, once `after` is reached."""
        with self._changed:
            if after is None:
                self._free.append(buffer)
            else:
                self._copying.append((after, buffer))
            self._changed.notify_all()

    def drop(self) -> None:
        """Let the memory of buffers go that nobody uses."""
        with self._changed:
            self._sort_out()
            self._made -= len(self._free)
            self._free.clear()

    def _sort_out(self) -> None:
        for _ in range(len(self._copying)):
            end, buffer = self._copying.popleft()
            if is_reached(end):
                self._free.append(buffer)
            else:
                self._copying.append((end, buffer))


class Reading:
    """A range of an offer on its way into host memory, and then there, until `release`.

    `host`: bytes that are there already (None: none); `parts`: (offset, bytes on a device) that come on top. `made`:
    when a device will have made what the offer had to copy there, after the boundary.
    """

    def __init__(
        self, staging: Staging, host: memoryview | None, parts: list[tuple[int, torch.Tensor]], nbytes: int,
        made: Mapping[Device, Mark] | None = None,
    ) -> None:  # fmt: skip
        self._staging, self._host, self._parts, self._nbytes = staging, host, parts, nbytes
        self._made = made or {}
        self._buffer: torch.Tensor | None = None
        self._copies: dict[Device, Mark] = {}

    @property
    def copied(self) -> bool:
        """It has to be copied from a device first."""
        return bool(self._parts)

    def begin(self, within_s: float = COPY_S) -> bool:
        """Begin to copy; False: there is no buffer within that time. Raises RuntimeError: the device cannot."""
        if not self._parts:
            return True
        first = _device(self._parts[0][1])
        buffer = self._staging.take(first, within_s)
        if buffer is None:
            return False
        self._buffer = buffer
        if self._host is not None:
            byte_view(buffer)[: self._nbytes] = self._host
        for offset, source in self._parts:
            device = _device(source)
            after = None if device in self._copies else self._made.get(device) or self._staging.boundary(device)
            self._copies[device] = device.copy(buffer[offset : offset + source.numel()], source, after)
        return True

    def view(self) -> memoryview:
        """Its bytes, once they are all there; OSError: the device did not copy them."""
        if self._buffer is None:
            assert self._host is not None
            return self._host
        for end in self._copies.values():
            try:
                if not wait_for(end, COPY_S):
                    raise OSError(f"the device has not copied {self._nbytes} bytes within {COPY_S:g} s")
            except RuntimeError as error:
                raise OSError(f"the device could not copy: {error}") from error
        return byte_view(self._buffer)[: self._nbytes]

    def release(self, after: Mark | None = None) -> None:
        """Nothing reads it any more, once `after` is reached. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            marks = [*self._copies.values(), *([after] if after is not None else [])]
            late = [mark for mark in marks if not is_reached(mark)]
            self._staging.give_back(buffer, All(late) if late else None)


def _devices(state: object) -> list[Device]:
    """Those that tensors of the state lie on, each once, in order of appearance."""
    found = dict.fromkeys(devices.device_of(tensor) for tensor in tensors_in(state))
    return [device for device in found if device is not None]


def _device(tensor: torch.Tensor) -> Device:
    device = devices.device_of(tensor)
    assert device is not None
    return device
