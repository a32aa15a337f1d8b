"""`TorchCommunicator`: a communicator over one of torch's own backends of devices (NCCL's, XCCL's).

How it works. `init` makes the backend, connects it at once and sends a short and a long tensor round: a library that
connects when an algorithm is first used has connected then, and no later launch waits for peers. Of the backend only
launches, waits, its future and its abort are used. What torch would do on its own account (waits that end after a
timeout and abort, a watchdog that ends the process) is switched off or not called, because it would end kernels behind
the back of `errored()`.

How the end of a collective is known: an event of our own. After each launch a stream beside the others is put behind
the collective, and an event recorded there; that stream is entered by torch's C++ (`with stream`), for a tenth of what
torch's function in Python costs. Asking the event is a call of the driver's alone. The work's own `is_completed` asks
NCCL as well, and waits for a lock that an abort holds.

Why it keeps the tensors: being put behind a collective is, for torch's work, the end of its interest in the tensors.
Ours is not the user's stream, so they are kept here until the event has come.

A barrier is an allreduce of one element: torch's own blocks the host inside the wait, with no way to give it up.

With `async_op=False` torch's NCCL runs a collective on the current stream and returns no work; returned on, None ends
the process (torch 2.13 passes it into C++ unchecked). So there is always a `Launched`.

Threads: `init` on the forming thread, launches one at a time, `abort` on a thread of its own; each sets the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, HashStore, PrefixStore

from ft_core.process_group.device.communicator import NothingQueuedError
from ft_core.process_group.device.tensors import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store, Work

NEVER = timedelta(days=365)
"""torch's own timeout of a collective, where a backend has to be given one: longer than any job."""
POLL_S = 0.001
CONNECTING = 1, 1 << 20
"""Elements of the tensors that `init` reduces: NCCL takes a tree for short ones, a ring for long ones."""
MAX_ASKED = 64
"""Of the collectives in flight so many of the oldest ones are asked whether the library has failed them."""
_ONLY_THROUGH_DISPATCHER = frozenset({"allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"})
_FAILED_BEFORE = "ncclRemoteError"
"""What torch's message names where NCCL has lost a peer. NCCL looks for that before it queues anything."""
_RESULTS = {1: "timed out", 2: "failed: the library reports an error, as it does when a peer has gone"}
"""torch's WorkResult: 0 is success."""


class TorchCommunicator:
    """One group over the backend that `make(store, rank, world_size)` returns, for tensors on `device`.

    `streams`: the module with that kind of device's streams and events; torch's by default.
    """

    def __init__(
        self,
        kind: str,
        device: torch.device,
        backend_type: Any,
        make: Callable[[Store, int, int], Any],
        streams: Any = None,
    ) -> None:
        self.kind = kind
        self._device = device
        self._backend_type = backend_type
        self._make = make
        self._streams: Any = streams or torch.get_device_module(device.type)
        self._backend: Any = None
        self._dispatcher: Any = None
        self._side: Any = None
        self._options: Any = None
        """Of a barrier's allreduce."""
        self._zero: torch.Tensor | None = None
        """What a barrier reduces: it stays zero."""
        self._asked: deque[_TorchLaunched] = deque()
        self._asking = threading.Lock()

    def __repr__(self) -> str:
        return f"TorchCommunicator({self.kind}, {self._device})"

    def init(self, store: Store, rank: int, world_size: int, checkpoint: Callable[[], None]) -> None:
        """Make the backend, connect it, and reduce zeros over all ranks."""
        with self._streams.device(self._device):
            self._backend = backend = self._make(store, rank, world_size)
            backend.eager_connect_single_device(self._device)
            checkpoint()  # nothing could end that call; what is launched now would wait for peers who have given up
            self._dispatcher = self._new_dispatcher(rank, world_size)
            self._side = self._streams.Stream(self._device)
            self._options = AllreduceOptions()
            self._zero = torch.zeros(1, device=self._device)
            for elements in CONNECTING:
                first = self.launch("allreduce", [torch.zeros(elements, device=self._device)], self._options)
                while not first.is_done():
                    checkpoint()
                    time.sleep(POLL_S)

    def _new_dispatcher(self, rank: int, world_size: int) -> Any:
        """Return torch's own C++ group over the backend, for the operations that it lacks in Python."""
        group = dist.ProcessGroup(PrefixStore("", HashStore()), rank, world_size)
        group._register_backend(self._device, self._backend_type, self._backend)
        return group

    def launch(self, name: str, *arguments: Any) -> _TorchLaunched:
        """Start the collective behind the current stream."""
        if name == "barrier":
            name, arguments = "allreduce", ([self._zero], self._options)
        if name == "reduce_scatter":
            name, arguments = _flat(*arguments)
        target = self._dispatcher if name in _ONLY_THROUGH_DISPATCHER else self._backend
        try:
            inner = getattr(target, name)(*arguments)
        except RuntimeError as error:
            if _FAILED_BEFORE in str(error):
                raise NothingQueuedError(str(error)) from error
            raise
        event = self._streams.Event()
        if inner is None:
            event.record(self._streams.current_stream(self._device))
        else:
            if name == "reduce_scatter":
                # torch copies the parts into memory of the current stream, and lets that go in the first wait. On that
                # stream nothing runs before the collective has ended; on ours, the memory would be given to the next.
                inner.wait()
            with self._side:
                inner.wait()
                event.record(self._side)
        launched = _TorchLaunched(name, arguments, inner, event, self._streams, self._device)
        self._asked.append(launched)
        return launched

    def query(self) -> str | None:
        """What torch's watchdog has found out about the collectives in flight."""
        if not self._asking.acquire(blocking=False):
            return None  # another thread is just asking
        try:
            while self._asked and self._asked[0].is_done():
                self._asked.popleft()
            oldest = [self._asked[index] for index in range(min(MAX_ASKED, len(self._asked)))]
        finally:
            self._asking.release()
        return next((found for launched in oldest if (found := launched.failure()) is not None), None)

    def abort(self) -> None:
        """End all kernels; nothing to do where init never made a backend."""
        if self._backend is not None:
            with self._streams.device(self._device):
                self._backend.abort()


def _flat(outputs: Any, inputs: Any, opts: Any) -> tuple[str, tuple[Any, ...]]:
    """A reduce-scatter of equal parts as one of a whole. torch would make the same copy, and let it go in `wait`.

    What comes is written in the order in which the output lies in memory, so that has to be the one of its indices.
    """
    alike = len(outputs) == 1 and outputs[0].is_contiguous()
    if not alike or any(part.shape != outputs[0].shape for part in inputs[0]):
        return "reduce_scatter", (outputs, inputs, opts)
    return "_reduce_scatter_base", (outputs[0], torch.stack([*inputs[0]]), opts)


class _TorchLaunched:
    def __init__(
        self, name: str, arguments: Any, inner: Work | None, event: Any, streams: Any, device: torch.device
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._inner = inner
        self._event = event
        self._streams = streams
        self._device = device
        self._outputs = list(tensors_of(arguments[:1]))
        self._asks = inner is not None and hasattr(inner, "get_future_result")
        self._result: Any = None

    def order(self) -> None:
        if self._inner is not None:
            self._inner.wait()  # without a timeout: it only orders the streams, also after an abort
        else:
            self._streams.current_stream(self._device).wait_event(self._event)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def future(self) -> torch.futures.Future[Any]:
        if self._inner is not None:
            return self._inner.get_future()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
        with self._streams.device(self._device):
            self.order()
            future.set_result(self._outputs)
        return future

    def failure(self) -> str | None:
        """What torch's watchdog says of it; a backend that says nothing is asked once."""
        if not self._asks:
            return None
        try:
            if self._result is None:
                assert self._inner is not None
                self._result = self._inner.get_future_result()  # type: ignore[attr-defined]  # not in torch's stub
            if not self._result.done():
                return None
            code = int(self._result.value())
        except (RuntimeError, NotImplementedError):
            self._asks = False
            return None
        return f"{self._name} {_RESULTS.get(code, f'ended with result {code}')}" if code else None
