"""The program of test_fabric.py: trains with Fabric, prints every step, and a digest of all state at the end."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import pathlib
import sys
import threading
from typing import Any

import torch
from torch import nn


class Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def last_step() -> int:
    """Where to end: the test decides while the job runs."""
    path = pathlib.Path(os.environ["STEPS_FILE"])
    return int(path.read_text()) if path.exists() else 1_000_000


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def loss_of(model: Any, step: int, shard: int) -> torch.Tensor:
    """Of this shard's data in this step."""
    data = torch.Generator().manual_seed(step * 64 + shard)
    return nn.functional.mse_loss(model(torch.randn(4, 8, generator=data)), torch.randn(4, 2, generator=data))


def set_up(fabric: Any, model: Any, optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """Lightning 2.5.0's `setup` knows no schedulers: users register them."""
    if "scheduler" in inspect.signature(fabric.setup).parameters:
        model, optimizer, same = fabric.setup(model, optimizer, scheduler=scheduler)
        assert same is scheduler
        return model, optimizer
    model, optimizer = fabric.setup(model, optimizer)
    fabric.strategy.register("lr_scheduler_0", scheduler)
    return model, optimizer


def main() -> None:
    fabric_module = importlib.import_module(os.environ.get("FABRIC", "lightning.fabric"))
    fabric = fabric_module.Fabric(strategy="fault_tolerant", accelerator="cpu", devices=int(os.environ["DEVICES"]))
    fabric.launch()
    model: Any = build()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    model, optimizer = set_up(fabric, model, optimizer, scheduler)
    strategy: Any = fabric.strategy
    progress = Progress()
    strategy.register("progress", progress)
    while True:
        strategy.open_step()
        if progress.step >= last_step():
            break
        optimizer.zero_grad()
        fabric.backward(loss_of(model, progress.step, strategy.replica_group * 8 + fabric.global_rank))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        if strategy.step_vetoed:
            print("veto", progress.step, flush=True)
            continue
        scheduler.step()
        progress.step += 1
        members = strategy.manager.num_participants()
        print("commit", progress.step, members, os.getpid(), flush=True)
        threading.Event().wait(0.02)  # leave the processor to those that start
    digest = hashlib.sha256()
    for value in [*model.state_dict().values(), *optimizer.state_dict()["state"][0].values()]:
        digest.update(value.numpy().tobytes())
    digest.update(repr(scheduler.state_dict()["last_epoch"]).encode())
    size = model.module[0].weight.abs().sum().item()
    print("done", progress.step, digest.hexdigest()[:16], f"{size:.4f}", flush=True)
    strategy.finish()


if __name__ == "__main__":
    main()
    sys.exit(0)
