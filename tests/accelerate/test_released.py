"""What a script has dropped is gone at once: no reference cycle holds an Accelerator, its models or its workers."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.state import PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator
from ft_core.control.lighthouse.server import LighthouseServer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, token="")
    settings = {
        "FT_LIGHTHOUSE": server.address().removeprefix("http://"), "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": "0",
        "FT_NUM_REPLICA_GROUPS": "1", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    importlib.import_module("torch._dynamo")  # the first optimizer imports it, and that keeps the importing frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    server.shutdown()
    PartialState._reset_state()


class Script:
    """Names that a script has."""

    def __init__(self, workers: int = 1, **plugin: Any) -> None:
        settings = FaultTolerancePlugin(**plugin)
        self.accelerator: Any = FaultTolerantAccelerator(fault_tolerance_plugin=settings)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data: Any = DataLoader(
            TensorDataset(torch.randn(8, 2)), 2, num_workers=workers, persistent_workers=workers > 0
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        self.model, self.optimizer, self.data, self.scheduler = self.accelerator.prepare(
            model, optimizer, data, scheduler
        )
        self.dropped = [weakref.ref(kept) for kept in (self.accelerator, self.data, self.model, self.optimizer)]

    def train(self) -> None:
        for (x,) in self.data:
            self.step(x)

    def step(self, x: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(x).sum())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()


def alive(dropped: list[weakref.ref[Any]]) -> list[str]:
    return [type(kept).__name__ for reference in dropped if (kept := reference()) is not None]


@pytest.mark.parametrize("elastic", [False, True])
def test_after_the_end_of_training(elastic: bool) -> None:
    script = Script(elastic_data=elastic)
    script.train()
    assert len(multiprocessing.active_children()) == 1
    script.accelerator.end_training()
    dropped = script.dropped
    del script
    assert alive(dropped) == []
    assert multiprocessing.active_children() == []


def test_after_free_memory() -> None:
    script = Script()
    script.train()
    script.accelerator.free_memory()
    dropped = script.dropped
    del script
    assert alive(dropped) == []


def test_without_a_step() -> None:
    dropped = Script(workers=0).dropped
    gc.collect()
    assert alive(dropped[:1]) != [], "its Manager is in the job until it leaves, so it may not just vanish"
    second = Script(workers=0)  # which ends the run before
    assert alive(dropped) == []
    second.accelerator.end_training()


def test_a_script_may_keep_only_what_was_prepared() -> None:
    """While its run lives the accelerator does, too: peers ask it for state, and it knows who leads."""

    def prepared() -> Any:
        script = Script(workers=0)
        return script.model, script.optimizer, script.data, script.dropped

    model, optimizer, data, dropped = prepared()
    gc.collect()
    for (x,) in data:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = dropped[0]()
    assert accelerator.committed_steps == 4
    accelerator.end_training()
    del accelerator, model, optimizer, data, x
    assert alive(dropped) == []
