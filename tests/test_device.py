"""What the host does with the memory of a device: on the CPU all is done at once; on an accelerator nothing blocks."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from ft_core.device import (
    RESERVED,
    RESERVED_LEAST_BYTES,
    RESERVED_MOST,
    Accelerator,
    HostMemory,
    device_of,
    sizes_up_to,
)

needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


def test_in_cpu_memory_all_is_done_at_once() -> None:
    memory = device_of(torch.device("cpu"))
    assert isinstance(memory, HostMemory)
    assert memory.immediate
    numbers, tensor = torch.tensor([1, 0, 3], dtype=torch.uint8), torch.zeros(3)
    memory.reserve(1 << 60)
    memory.put(numbers, tensor)
    assert tensor.tolist() == [1.0, 0.0, 3.0]
    assert memory.fetch(tensor) is tensor
    assert memory.mark().query()
    stream = memory.current_stream()
    stream.wait_stream(memory.current_stream())
    assert stream == memory.current_stream()
    assert memory.stream_number() == memory.stream_number()
    assert repr(memory) == "HostMemory()"


def test_sizes_are_those_of_torchs_allocator_of_pinned_memory() -> None:
    assert sizes_up_to(0) == sizes_up_to(1) == [1]
    assert sizes_up_to(288) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert sizes_up_to(512) == sizes_up_to(288)


class Kept:
    """torch's allocator of pinned memory: what is let go is handed out again, by size."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.in_use: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        size = sizes_up_to(nbytes)[-1]
        if self.in_use.count(size) == self.made.count(size):
            self.made.append(size)
        self.in_use.append(size)
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        weakref.finalize(tensor, self.in_use.remove, size)
        return tensor


def test_what_one_more_user_needs_is_made_when_it_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: None)
    memory, kept = Accelerator(torch.device("meta")), Kept()
    monkeypatch.setattr(memory, "_pinned", kept)
    for users in (1, 2):
        memory.reserve(100)
        assert kept.in_use == []
        assert {size: kept.made.count(size) for size in kept.made} == dict.fromkeys(
            sizes_up_to(RESERVED_LEAST_BYTES), users * RESERVED
        )
    memory.reserve(5000)
    assert (kept.made.count(8192), kept.made.count(4096)) == (RESERVED, 3 * RESERVED)
    for _ in range(RESERVED_MOST):
        memory.reserve(1)
    assert kept.made.count(4096) == RESERVED_MOST


@pytest.mark.gpu
@needs_accelerator
class TestAccelerator:
    def busy(self, device: torch.device) -> None:
        """Queue about half a second of work."""
        a = torch.randn(8192, 8192, device=device)
        for _ in range(40):
            a = (a @ a).clamp_(-1, 1)

    def test_numbers_go_and_come_in_the_order_of_the_stream_and_the_host_goes_on(self) -> None:
        device = torch.accelerator.current_accelerator()
        assert device is not None
        device = torch.device(device.type, torch.accelerator.current_device_index())
        memory = device_of(device)
        assert isinstance(memory, Accelerator)
        assert not memory.immediate
        tensor, numbers = torch.zeros(3, device=device), torch.tensor([1, 2, 3], dtype=torch.uint8)
        memory.reserve(tensor.nbytes)
        self.busy(device)
        memory.put(numbers, tensor)
        memory.fetch(tensor.mul_(1))  # CUDA loads a kernel when it is first used, and may wait for the device then
        torch.accelerator.synchronize()
        began = time.monotonic()
        self.busy(device)
        memory.put(numbers, tensor)
        numbers.zero_()  # it is the caller's again
        tensor.mul_(2)
        told, mark = memory.fetch(tensor), memory.mark()
        queued_s = time.monotonic() - began
        reached_at_once = mark.query()
        while not mark.query():
            pass
        done_s = time.monotonic() - began
        assert told.is_pinned()
        assert told.tolist() == [2.0, 4.0, 6.0]
        assert not reached_at_once
        assert queued_s < done_s / 4

    @pytest.mark.skipif(
        not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"), reason="torch does not count it"
    )
    def test_what_was_reserved_is_used_and_nothing_more_is_made(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = device_of(device)
        memory.reserve(20_000)
        made = torch.cuda.host_memory_stats()["num_host_alloc"]
        for nbytes in (4, 288, 4096, 16_384, 20_000):
            tensor = torch.zeros(nbytes // 4, device=device)
            kept = []
            for _ in range(RESERVED // 2):
                memory.put(torch.ones(nbytes // 4), tensor)
                kept.append(memory.fetch(tensor))
            mark = memory.mark()
            while not mark.query():
                pass
            assert all(bool((told == 1).all()) for told in kept)
        assert torch.cuda.host_memory_stats()["num_host_alloc"] == made

    def test_streams_are_put_behind_each_other(self) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "xpu", torch.accelerator.current_device_index())
        memory, module = device_of(device), torch.get_device_module(device)
        side = module.Stream(device)
        tensor = torch.zeros(1, device=device)
        torch.accelerator.synchronize()
        with module.stream(side):
            assert memory.current_stream() == side
            self.busy(device)
            tensor.fill_(5)
        main = memory.current_stream()
        assert main != side
        main.wait_stream(side)
        told, mark = memory.fetch(tensor), memory.mark()
        assert not mark.query()
        while not mark.query():
            pass
        assert told.item() == 5
