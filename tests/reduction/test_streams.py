"""Gradients on a device: what runs behind what on its streams, and what the host takes its decisions from.

The device is `tests.devices.FakeDevice`, over tensors in CPU memory; a stream is a thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from ft_core.ddp import DistributedDataParallel
from ft_core.reduction.autograd import queue_callback
from ft_core.reduction.interface import FENCE_SLOTS
from tests.devices import FakeDevice
from tests.reduction.fakes import FakeAttempt, FakeHost

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL_MB = 1e-6
"""Each parameter has a bucket of its own."""


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    device.close()


class Attempt(FakeAttempt):
    """Its works start once what the launching stream was given before has been done."""

    def __init__(self, device: FakeDevice, **options: Any) -> None:
        super().__init__(**options)
        self.device = device
        self.starts: list[Any] = []
        """A mark per launch: when the collective may start."""
        self.read_last: list[Tensor] = []

    def _launch(self, event: str, tensor: Tensor) -> Any:
        self.starts.append(self.device.mark())
        return super()._launch(event, tensor)

    def read(self, tensor: Tensor) -> Tensor:
        self.events.append("read")
        return self.told(tensor)

    def told(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def wrapped(device: FakeDevice, module: nn.Module, **options: Any) -> tuple[Any, FakeHost]:
    host = FakeHost()
    host.device_of = lambda _device: device  # type: ignore[assignment]
    return DistributedDataParallel(host, module, **options), host


def on_stream(device: FakeDevice, parameter: Tensor, stream: Any) -> None:
    """As autograd does: the gradient of `parameter` is computed, and its hooks run, on that stream."""

    def switch(_gradient: Tensor) -> None:
        device.current = stream

    parameter.register_hook(switch)


@pytest.mark.parametrize("behind", ["weight", "bias"])
def test_a_collective_runs_behind_all_streams_that_wrote_its_bucket(device: FakeDevice, behind: str) -> None:
    """One gradient of the only bucket was computed on a stream that is behind; the other one's may launch it."""
    side, main, gate = device.stream("side"), device.current, threading.Event()
    model = nn.Linear(3, 2)
    ddp, host = wrapped(device, model)
    attempt = Attempt(device)
    host.attempt = attempt
    for name, parameter in model.named_parameters():
        on_stream(device, parameter, side if name == behind else main)
    side.run(gate.wait)
    ddp(torch.randn(4, 3)).sum().backward()
    (start,) = attempt.starts
    assert not start.reached.wait(0.05)
    gate.set()
    assert start.reached.wait(20)


def test_a_bucket_that_is_ready_early_is_launched_behind_its_own_stream(device: FakeDevice) -> None:
    """It is launched at the end of backward, on the script's stream: the bucket before it lacked a gradient."""
    side, main, gate = device.stream("side"), device.current, threading.Event()
    first, second = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)
    ddp, host = wrapped(device, nn.Sequential(first, second), bucket_cap_mb=SMALL_MB)
    attempt = Attempt(device)
    host.attempt = attempt
    on_stream(device, first.weight, side)
    side.run(gate.wait)
    reducer = ddp.gradient_reducer
    assert [bucket.parameters for bucket in reducer._buckets[:2]] == [[1], [0]]
    reducer.before_forward(sync=True)
    hidden = first(torch.randn(4, 3))
    # As autograd does: callbacks run on the stream of who called backward.
    hidden.register_hook(lambda _gradient: queue_callback(lambda: setattr(device, "current", main)))
    hidden.sum().backward()
    assert len(attempt.starts) == len(reducer._buckets)
    assert attempt.starts[0].reached.wait(20)
    assert not attempt.starts[1].reached.wait(0.05)
    gate.set()
    assert attempt.starts[1].reached.wait(20)


def test_a_stream_is_waited_for_once(device: FakeDevice) -> None:
    ddp, host = wrapped(device, nn.Linear(3, 2))
    for _ in range(2):
        host.attempt = Attempt(device)
        ddp(torch.randn(4, 3)).sum().backward()
        assert [bucket._streams for bucket in ddp.gradient_reducer._buckets] == [{}]


def test_in_cpu_memory_no_gradient_asks_for_a_stream() -> None:
    host = FakeHost()
    ddp = DistributedDataParallel(host, nn.Linear(3, 2))
    hooks = [hook for p in ddp.parameters() for hook in p._post_accumulate_grad_hooks.values()]
    assert len(hooks) == 2
    assert {hook.__qualname__.split(".")[0] for hook in hooks} == {"BucketReducer"}


class Tells(Attempt):
    """The host is told other numbers than those that lie in the device's memory: only these may count."""

    def told(self, tensor: Tensor) -> Tensor:
        told = torch.full_like(tensor, 2.0)
        told[-1] = 0.0
        return told


def test_the_fence_and_which_gradients_nobody_has_are_what_was_read(device: FakeDevice) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(1, 1, bias=False)})
    ddp, host = wrapped(device, model)
    attempt = Tells(device)
    host.attempt = attempt
    ddp.gradient_reducer.before_forward(sync=True)
    model["used"](torch.randn(4, 3)).sum().backward()
    assert attempt.events[-2:] == ["read", "arrived"]
    assert attempt.tails[0].tolist() == [2.0] * FENCE_SLOTS
    grads = {name: parameter.grad is None for name, parameter in model.named_parameters()}
    assert grads == {"used.weight": False, "used.bias": False, "idle.weight": True}


class CutShort(Attempt):
    def told(self, tensor: Tensor) -> Tensor:
        raise RuntimeError("cut short")


def test_what_was_cut_short_breaks_the_attempt_and_leaves_backward(device: FakeDevice) -> None:
    ddp, host = wrapped(device, nn.Linear(3, 2))
    attempt = CutShort(device)
    host.attempt = attempt
    ddp(torch.randn(4, 3)).sum().backward()
    assert [str(error) for error in attempt.errors] == ["cut short"]
    assert "arrived" not in attempt.events
    assert "broken" in repr(ddp.gradient_reducer)


class ElsewhereBallot(Attempt):
    rides = False


def test_without_a_ballot_the_host_reads_only_what_it_needs(device: FakeDevice) -> None:
    """Where all gradients are there it goes on at once, before the device has them; the vote waits for the device."""
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(1, 1)})
    ddp, host = wrapped(device, model)
    for loss, reads in ((lambda: ddp.module["used"](torch.ones(1, 3)).sum(), 1), (lambda: both(ddp.module), 0)):
        host.attempt = attempt = ElsewhereBallot(device)
        ddp.gradient_reducer.before_forward(sync=True)
        loss().backward()
        ddp.gradient_reducer.committed()
        assert attempt.events.count("read") == reads


def both(model: Any) -> Tensor:
    total: Tensor = model["used"](torch.ones(1, 3)).sum() + model["idle"](torch.ones(1, 1)).sum()
    return total
