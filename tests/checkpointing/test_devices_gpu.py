"""The same with a real device: state from and to CUDA memory, and how fast."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.checkpointing import HTTPTransport, devices
from ft_core.checkpointing.ranges import RANGE_BYTES
from ft_core.checkpointing.staging import Reading, Staging
from tests.checkpointing.conftest import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture
def pair() -> Iterator[list[HTTPTransport[Any]]]:
    made: list[HTTPTransport[Any]] = [HTTPTransport(timedelta(seconds=20)) for _ in range(2)]
    yield made
    for transport in made:
        transport.shutdown()


def test_state_goes_from_device_to_device_behind_what_was_launched(pair: list[HTTPTransport[Any]]) -> None:
    state: Any = {
        "w": torch.zeros(16 * MIB, device="cuda"),
        "small": [torch.full((9,), float(i), device="cuda") for i in range(40)],
    }
    own: Any = {
        "w": torch.full((16 * MIB,), 7.0, device="cuda"),
        "small": [torch.zeros(9, device="cuda") for _ in range(40)],
    }
    work = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        work = torch.tanh(work @ work)
    state["w"].add_(3.0)  # behind all that
    pair[0].mark(state)
    pair[0].server.offer("t", state)
    own["w"].fill_(1.0)
    pair[1].mark(own)
    found = pair[1].fetch([pair[0].metadata()], "t", into=own)
    assert found.state["w"] is own["w"]
    assert bool((own["w"] == 3.0).all())
    assert [int(t[0]) for t in own["small"]] == list(range(40))


def test_what_is_captured_is_as_of_the_boundary_of_training_on_a_stream_of_its_own(
    pair: list[HTTPTransport[Any]],
) -> None:
    """The quorum worker copies what is not contiguous on another stream."""
    whole = torch.zeros(2048, 1024, device="cuda")
    state: Any = {"w": whole.t()}
    work = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            work = torch.tanh(work @ work)
        whole.add_(3.0)  # behind all that
        pair[0].mark(state)
    worker = threading.Thread(target=pair[0].server.offer, args=("t", state))
    worker.start()
    worker.join()
    found = pair[1].fetch([pair[0].metadata()], "t")
    assert bool((found.state["w"] == 3.0).all())


def test_an_event_ends_at_its_deadline_and_a_copy_in_pinned_memory() -> None:
    source = torch.arange(RANGE_BYTES, device="cuda").to(torch.uint8)
    staging = Staging(0)
    staging.mark(source)
    reading = Reading(staging, None, [(0, devices.byte_slice(source, 0, RANGE_BYTES))], RANGE_BYTES)
    assert reading.begin()
    assert bytes(reading.view()) == bytes(source.cpu().numpy().tobytes())
    reading.release()
    device = devices.device_of(source)
    assert device is not None
    torch.cuda._sleep(1 << 32)  # seconds
    assert not devices.wait_for(device.mark(), 0.01)
    torch.cuda.synchronize()
    assert device.pinned(16).is_pinned()


def test_at_least_four_fifths_of_what_plain_copies_do() -> None:
    from benchmarks.device_state import measure

    found = measure(megabytes=512, runs=5)
    assert found.share >= 0.8, found
