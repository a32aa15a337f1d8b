"""On a real GPU, without naming a group: a Manager trains over the group of its model's device."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from ft_core import DistributedDataParallel, Manager, Optimizer
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address().removeprefix("http://"))
    monkeypatch.setenv("FT_HOSTNAME", "127.0.0.1")
    monkeypatch.delenv("FT_BACKEND", raising=False)
    yield
    server.shutdown()


@pytest.mark.parametrize(("backend", "name"), [("", "nccl"), ("gloo", "gloo")])
@pytest.mark.filterwarnings("ignore:gradients on cuda are reduced over")
def test_the_group_follows_the_device_and_ft_backend_overrides(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    monkeypatch.setenv("FT_BACKEND", backend)
    model = nn.Linear(8, 4).to("cuda:0")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    manager = Manager(
        min_replica_size=1, timeout=timedelta(seconds=60), state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
    )  # fmt: skip
    try:
        ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
        group = manager._runtime.shell.communicators.gradients
        assert group.torch_backend == name
        assert group.carries_cpu_memory == (name == "gloo")
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(2, 8, device="cuda:0")).square().mean().backward()
            optimizer.step()
            assert optimizer.committed, manager.errored()
        count = torch.ones(1)
        manager.start_quorum()
        manager.allreduce(count).wait()
        assert manager.errored() is None, "CPU memory beside the group of the device"
    finally:
        manager.shutdown()


def test_a_model_on_two_kinds_of_device_is_refused_when_it_is_wrapped() -> None:
    model = nn.Sequential(nn.Linear(8, 4).to("cuda:0"), nn.Linear(4, 2))
    manager = Manager(min_replica_size=1, state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    try:
        with pytest.raises(ConfigError, match=r"several types: cpu, cuda; put the whole model on one"):
            DistributedDataParallel(manager, model)
    finally:
        manager.shutdown()
