"""What the host does with the memory of a device: on the CPU all is done at once; on an accelerator nothing blocks."""

from __future__ import annotations

import time

import pytest
import torch

from ft_core.device import Accelerator, HostMemory, device_of

needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


def test_in_cpu_memory_all_is_done_at_once() -> None:
    memory = device_of(torch.device("cpu"))
    assert isinstance(memory, HostMemory)
    assert memory.immediate
    numbers, tensor = torch.tensor([1, 0, 3], dtype=torch.uint8), torch.zeros(3)
    memory.put(numbers, tensor)
    assert tensor.tolist() == [1.0, 0.0, 3.0]
    assert memory.fetch(tensor) is tensor
    assert memory.mark().query()
    stream = memory.current_stream()
    stream.wait_stream(memory.current_stream())
    assert stream == memory.current_stream()
    assert repr(memory) == "HostMemory()"


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
        self.busy(device)
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
