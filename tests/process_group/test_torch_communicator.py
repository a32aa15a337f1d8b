"""`TorchCommunicator` without a device: its backend is Gloo's, its streams and events are pretended.

What it asks of torch's backends is the same for all of them. What only a device shows: test_gpu.py.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, HashStore, ReduceScatterOptions
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo

from ft_core.errors import CollectiveError
from ft_core.process_group.device.communicator import NothingQueuedError
from ft_core.process_group.device.group import one_of_ours
from ft_core.process_group.device.torch_communicator import CONNECTING, TorchCommunicator, _flat
from tests.process_group.ranks import in_threads, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")


class PretendedStreams:
    """CPU memory has one stream, the host: an event that is recorded has come, unless it is held back."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.held = False

    class Event:
        streams: PretendedStreams

        def record(self, stream: Any = None) -> None:
            self.streams.told.append(f"record on {stream}")

        def query(self) -> bool:
            return not self.streams.held

    def Stream(self, device: torch.device) -> PretendedStream:
        return PretendedStream(self)

    def current_stream(self, device: torch.device) -> Any:
        return self

    def wait_event(self, event: Any) -> None:
        self.told.append("the current stream waits")

    def __str__(self) -> str:
        return "current"

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.told.append(f"on {device}")
        yield


class PretendedStream:
    """As `torch.Stream`: it is current inside of `with`, which does not nest."""

    def __init__(self, streams: PretendedStreams) -> None:
        self._streams = streams
        self._inside = False

    def __str__(self) -> str:
        return "side"

    def __enter__(self) -> PretendedStream:
        assert not self._inside
        self._inside = True
        self._streams.told.append("in side")
        return self

    def __exit__(self, *_: object) -> None:
        self._inside = False
        self._streams.told.append("out of side")


class Backend:
    """Gloo's, with what only those of devices have."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        options = TorchGloo._Options()  # type: ignore[attr-defined]
        options._devices = [TorchGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        self.gloo = TorchGloo(store, rank, world_size, options)
        self.connected: list[torch.device] = []
        self.aborted = False
        self.sync = False
        self.codes: list[int] = []
        self.waited: Callable[[], object] = lambda: None
        """Called in each wait for a work, which is a place in the current stream."""
        self.reduced: list[int] = []
        """How many elements each allreduce had."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gloo, name)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.reduced.append(tensors[0].numel())
        work = self.gloo.allreduce(tensors, opts)  # type: ignore[attr-defined]  # not in torch's stub
        work.wait()
        return None if self.sync else Reporting(work, self.codes, self.waited)

    def abort(self) -> None:
        self.aborted = True


class Reporting:
    """A work on a device: who waits for it puts the current stream behind it; its watchdog may find something."""

    def __init__(self, inner: Any, codes: list[int], waited: Callable[[], object]) -> None:
        self._inner = inner
        self._codes = codes
        self._waited = waited

    def wait(self) -> bool:
        self._waited()
        return True

    def get_future(self) -> Any:
        return self._inner.get_future()

    def get_future_result(self) -> torch.futures.Future[int]:
        if not self._codes:
            raise NotImplementedError
        future: torch.futures.Future[int] = torch.futures.Future()
        if self._codes[0] >= 0:
            future.set_result(self._codes[0])
        return future


@pytest.fixture
def made() -> Callable[[int], list[tuple[TorchCommunicator, PretendedStreams, list[Backend]]]]:
    store = HashStore()

    def make(count: int) -> list[tuple[TorchCommunicator, PretendedStreams, list[Backend]]]:
        ranks = []
        for _ in range(count):
            streams, backends = PretendedStreams(), []  # type: PretendedStreams, list[Backend]
            streams.Event = type("Event", (PretendedStreams.Event,), {"streams": streams})  # type: ignore[assignment]

            def new(store: Any, rank: int, world_size: int, backends: list[Backend] = backends) -> Any:
                backends.append(Backend(store, rank, world_size))
                return backends[0]

            kind = dist.ProcessGroup.BackendType.GLOO
            communicator = TorchCommunicator("test 1", CPU, kind, new, streams)
            # torch's dispatcher takes backends of C++ alone.
            communicator._new_dispatcher = lambda *_: None  # type: ignore[method-assign]
            ranks.append((communicator, streams, backends))
        in_threads(count, lambda rank: ranks[rank][0].init(store, rank, count, lambda: None))
        return ranks

    return make


def test_init_connects_the_device_and_sends_a_short_and_a_long_tensor_round(made: Any) -> None:
    for communicator, streams, backends in made(2):
        assert backends[0].connected == [CPU]
        assert backends[0].reduced == list(CONNECTING)
        assert streams.told[0] == "on cpu"
        assert repr(communicator) == "TorchCommunicator(test 1, cpu)"


def test_an_init_that_was_given_up_while_it_connected_launches_nothing() -> None:
    """Its kernels would wait for peers who have given up as well, and so would the driver, in its abort."""
    backends: list[Backend] = []

    def new(store: Any, rank: int, world_size: int) -> Backend:
        backends.append(Backend(store, rank, world_size))
        return backends[0]

    def given_up() -> None:
        raise CollectiveError("given up")

    communicator = TorchCommunicator("test 1", CPU, dist.ProcessGroup.BackendType.GLOO, new, PretendedStreams())
    communicator._new_dispatcher = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(CollectiveError, match="given up"):
        communicator.init(HashStore(), 0, 1, given_up)
    assert (backends[0].connected, backends[0].reduced) == ([CPU], [])


def test_a_launch_records_an_event_behind_it_on_a_stream_of_our_own(made: Any) -> None:
    ((communicator, streams, backends),) = made(1)
    backends[0].waited = lambda: streams.told.append("behind it")
    streams.told.clear()
    tensor = torch.ones(2)
    launched = communicator.launch("allreduce", [tensor], AllreduceOptions())
    assert streams.told == ["in side", "behind it", "record on side", "out of side"]
    launched.order()
    assert streams.told[4:] == ["behind it"]
    assert launched.result()[0] is tensor
    assert launched.future().wait()[0] is tensor
    assert launched.is_done()
    streams.held = True
    assert not launched.is_done()


def test_what_torch_ran_on_the_current_stream_has_a_handle_all_the_same(made: Any) -> None:
    ((communicator, streams, backends),) = made(1)
    backends[0].sync = True
    streams.told.clear()
    tensor = torch.ones(2)
    launched = communicator.launch("allreduce", [tensor], AllreduceOptions())
    assert streams.told == ["record on current"]
    assert launched.failure() is None
    launched.order()
    assert streams.told[1:] == ["the current stream waits"]


@pytest.mark.parametrize(
    ("code", "says"), [(-1, None), (0, None), (1, "timed out"), (2, "reports an error"), (100, "ended with result 100")]
)
def test_what_torchs_watchdog_has_found_is_asked_without_waiting(made: Any, code: int, says: str | None) -> None:
    ((communicator, streams, backends),) = made(1)
    backends[0].codes.append(code)
    streams.held = True
    launched = communicator.launch("allreduce", [torch.ones(1)], AllreduceOptions())
    found = communicator.query()
    assert (found is None) == (says is None)
    assert says is None or (found is not None and says in found and found.startswith("allreduce "))
    streams.held = False
    assert communicator.query() is None  # what has ended is not asked any more
    assert wait_until(launched.is_done)


def test_a_backend_that_reports_nothing_is_not_asked_again(made: Any) -> None:
    ((communicator, streams, _),) = made(1)
    streams.held = True
    launched = communicator.launch("allreduce", [torch.ones(1)], AllreduceOptions())
    assert communicator.query() is None
    assert not launched._asks


def test_a_barrier_is_an_allreduce(made: Any) -> None:
    ranks = made(2)
    launched = in_threads(2, lambda rank: ranks[rank][0].launch("barrier", None))
    assert [one.result()[0].item() for one in launched] == [0.0, 0.0]
    assert [backends[0].reduced for _, _, backends in ranks] == [[*CONNECTING, 1]] * 2


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("NCCL error in: x.cpp:1, remote process exited\nncclRemoteError: A call failed", NothingQueuedError),
        ("NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA failed", RuntimeError),
    ],
)
def test_what_nccl_refuses_as_a_peer_has_gone_was_not_queued(made: Any, says: str, kind: type[Exception]) -> None:
    ((communicator, _, backends),) = made(1)

    def refuse(*_: object) -> None:
        raise RuntimeError(says)

    backends[0].allreduce = refuse
    with pytest.raises(RuntimeError) as raised:
        communicator.launch("allreduce", [torch.ones(2)], AllreduceOptions())
    assert type(raised.value) is kind


def test_a_reduce_scatter_is_one_of_a_whole_where_the_output_lies_in_the_order_of_its_indices() -> None:
    def name(output: torch.Tensor, *parts: torch.Tensor) -> str:
        return _flat([output], [list(parts)], ReduceScatterOptions())[0]

    plain = torch.zeros(2, 3, 4, 5)
    swapped = plain.to(memory_format=torch.channels_last)
    assert name(plain, plain, plain) == "_reduce_scatter_base"
    assert name(plain, swapped, plain) == "_reduce_scatter_base"
    assert name(swapped, plain, plain) == name(swapped, swapped, swapped) == "reduce_scatter"
    assert name(plain, plain, torch.zeros(1)) == "reduce_scatter"


def test_the_copies_that_torch_makes_of_the_parts_of_a_reduce_scatter_outlast_it(made: Any) -> None:
    """They are let go in the first wait: it has to be one of the stream that they were allocated on."""
    ((communicator, streams, backends),) = made(1)
    told, output = streams.told, torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    backends[0].reduce_scatter = lambda *_: Reporting(None, [], lambda: told.append("lets them go"))
    told.clear()
    communicator.launch("reduce_scatter", [output], [[output.clone()]], ReduceScatterOptions())
    assert told[:2] == ["lets them go", "in side"]


def test_abort_ends_the_backend_and_needs_none(made: Any) -> None:
    ((communicator, _, backends),) = made(1)
    communicator.abort()
    assert backends[0].aborted
    TorchCommunicator("test 1", CPU, None, lambda *_: None, PretendedStreams()).abort()


def test_the_device_is_chosen_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        @staticmethod
        def current_device() -> int:
            return 1

        @staticmethod
        def device_count() -> int:
            return 2

    monkeypatch.setattr(torch, "get_device_module", lambda _kind: Two)
    assert one_of_ours("cuda", None) == torch.device("cuda:1")
    assert one_of_ours("cuda", "cuda") == torch.device("cuda:1")
    assert one_of_ours("cuda", 0) == one_of_ours("cuda", "cuda:0") == torch.device("cuda:0")
    for wrong, says in (
        ("cpu", "expected one of cuda"),
        (2, "sees 2 of cuda"),
        ("cuda:7", "sees 2 of cuda"),
        ("nonsense", "nonsense"),
        (-1, "device=-1"),
    ):
        with pytest.raises(Exception, match=says) as raised:
            one_of_ours("cuda", wrong)
        assert type(raised.value).__name__ == "ConfigError"
