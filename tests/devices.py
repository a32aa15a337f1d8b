"""A device without one: streams that are threads, and a group whose works end on them while the host goes on.

`FakeDevice` lends its asynchrony to tensors in CPU memory: what the library queues on it (copies, marks, waits for
works) is done in order by the thread of a stream; what torch computes is done at once, as it is in CPU memory. So what
a test computes from a gradient before the device has it is wrong, as it would be for a host that reads too early.

`DeviceGroup` really reduces, over Gloo, on a stream of its own. A work's `wait` only puts the device's current stream
behind it. An abort latches the error first, then its works end, with garbage in their tensors.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from ft_core import ProcessGroupGloo
from ft_core.device import RESERVED_LEAST_BYTES
from ft_core.errors import CollectiveError
from ft_core.process_group import ProcessGroup
from ft_core.process_group.done_work import NO_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch import Tensor

GARBAGE = 1e30
LIMIT_S = 20.0
"""How long a stream waits for anything but an abort: longer than any test."""


class FakeMark:
    """A place in a stream."""

    def __init__(self, device: FakeDevice) -> None:
        self.reached = threading.Event()
        self._device = device

    def query(self) -> bool:
        if self.reached.is_set():
            return True
        self._device.look()
        return False


class FakeStream:
    """Does what it is given, in order, on a thread."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device = device
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=f"fake-stream-{name}", daemon=True)
        self._thread.start()

    def run(self, operation: Callable[[], object]) -> None:
        self._queue.put(operation)

    def mark(self) -> FakeMark:
        mark = FakeMark(self._device)
        self.run(mark.reached.set)
        return mark

    def wait_stream(self, stream: FakeStream) -> None:
        self.run(stream.mark().reached.wait)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation()


class FakeDevice:
    """`ft_core.device.Device` over tensors in CPU memory. `close` it at the end."""

    immediate = False

    def __init__(self, name: str = "fake") -> None:
        self._streams: list[FakeStream] = []
        self.name = name
        self.current = self.stream("main")
        """The stream that the script, or autograd, queues on."""
        self.looks = 0
        """How often a mark was not reached yet when the host asked."""
        self.on_look: Callable[[int], object] | None = None
        self.looked = threading.Event()
        """The host has begun to wait for this device."""
        self.puts: list[Tensor] = []
        self.reserved = 0
        """Bytes of the largest piece of pinned memory that need not be made any more."""
        self.made: list[int] = []
        """Sizes of pieces that were made while collectives ran."""

    def __repr__(self) -> str:
        return f"FakeDevice({self.name}, {self.looks} looks)"

    def stream(self, name: str) -> FakeStream:
        self._streams.append(FakeStream(self, f"{self.name}-{name}"))
        return self._streams[-1]

    def look(self) -> None:
        self.looks += 1
        self.looked.set()
        if self.on_look is not None:
            self.on_look(self.looks)

    def reserve(self, nbytes: int) -> None:
        self.reserved = max(self.reserved, nbytes, RESERVED_LEAST_BYTES)

    def _need(self, nbytes: int) -> None:
        if nbytes > self.reserved:
            self.made.append(nbytes)

    def put(self, numbers: Tensor, into: Tensor) -> None:
        self._need(into.nbytes)
        staged = numbers.clone()
        self.current.run(lambda: into.data.copy_(staged))

    def fetch(self, tensor: Tensor) -> Tensor:
        self._need(tensor.nbytes)
        numbers = torch.full_like(tensor, 7.0)  # until the copy has been made
        self.current.run(lambda: numbers.copy_(tensor))
        return numbers

    def mark(self) -> FakeMark:
        return self.current.mark()

    def current_stream(self) -> FakeStream:
        return self.current

    def stream_number(self) -> int:
        return id(self.current)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        assert self.made == [], "a real device may wait for a collective that hangs, to make pinned memory"


class DeviceGroup(ProcessGroup):
    """A group for the memory of one device.

    `at_end(number, tensors)` runs on the group's stream when the peers have the result of a work, the number-th of its
    quorum, and may hold it up: it is still under way here. False: it is cut short. By default a work ends once the host
    looks whether the device has finished, so that whoever does not look sees nothing.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device
        self.inner = ProcessGroupGloo(hostname="127.0.0.1")
        self.at_end: Callable[[int, list[Tensor]], bool] = self.when_looked_at
        self.lingers = False
        """After an abort its works go on as long as they can: until the next configure."""
        self.launched = 0
        """Works of this quorum."""
        self._stream = device.stream("group")
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self.aborted, self._released = threading.Event(), threading.Event()

    def __repr__(self) -> str:
        return f"DeviceGroup({self.inner!r}, {self._error!r})"

    def when_looked_at(self, number: int, tensors: list[Tensor]) -> bool:
        return self.device.looked.wait(LIMIT_S)

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        with self._lock:
            self._released.set()
            self.aborted, self._released = threading.Event(), threading.Event()
            self._error, self.launched = None, 0
        self.inner.configure(store_addr, replica_id, rank, world_size)

    def fail(self, error: Exception) -> None:
        """What an abort, or the library below, does first."""
        with self._lock:
            self._error = self._error or error
        self.aborted.set()
        self.device.looked.set()  # nobody may look any more

    def abort(self) -> None:
        self.fail(CollectiveError("abort() was called on the device's group"))
        self.inner.abort()

    def errored(self) -> Exception | None:
        return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self.abort()
        self._released.set()
        self.inner.shutdown()

    @property
    def carries_cpu_memory(self) -> bool:
        return False

    @property
    def blocks_host(self) -> bool:
        return False

    def sibling(self) -> DeviceGroup:
        sibling = DeviceGroup(self.device)
        if self.at_end != self.when_looked_at:
            sibling.at_end = self.at_end
        return sibling

    def getBackendName(self) -> str:
        return "ft-fake-device"

    def size(self) -> int:
        return self.inner.size()

    def rank(self) -> int:
        return self.inner.rank()

    def _launch(self, name: str, *arguments: Any) -> Work:
        with self._lock:
            if self._error is not None:
                raise self._error
            number, self.launched = self.launched, self.launched + 1
            aborted, released = self.aborted, self._released
        tensors, ready, done = list(arguments[0]), self.device.mark(), threading.Event()
        self.device.looked.clear()

        def operate() -> None:
            ready.reached.wait()
            whole = False
            try:
                if not aborted.is_set():
                    self.inner._launch(name, *arguments).wait()
                    whole = self.at_end(number, tensors) and not aborted.is_set()
            except CollectiveError:
                pass  # a kernel does not fail when a peer dies: it waits
            if not whole:
                aborted.wait()
                if self.lingers:
                    released.wait()
                for tensor in tensors:
                    tensor.data.fill_(GARBAGE)
            done.set()

        self._stream.run(operate)
        return DeviceWork(self.device, done, tensors)


class DeviceWork(Work):
    """A collective of a device."""

    def __init__(self, device: FakeDevice, done: threading.Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._device, self._done, self._tensors = device, done, tensors

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._device.current.run(self._done.wait)
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set()

    def result(self) -> list[Tensor]:
        return self._tensors
