"""A trainer process on elastic data: counts every sample it commits, and says at its end which were not counted once.

Prints `commit STEP PARTICIPANTS LINEAGE RANK`, `veto STEP RANK`, `epoch N`, `faults N FIRST...`, `done DIGEST RANK`.
Environment: LENGTH, EPOCHS, BATCH, GLOBAL (global_batch_size), WORKERS (of the loader), SLOW_STEP_MS (how long a step
takes at least until STEPS_FILE exists), LOG.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import Dataset

from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from ft_core.data import ElasticDataLoader
from ft_core.errors import JobFinishedError
from tests.data.managed import Counting


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main() -> int:
    torch.set_num_threads(1)
    env = os.environ
    length, epochs = int(env["LENGTH"]), int(env["EPOCHS"])
    if env.get("LOG"):
        logging.basicConfig(level=logging.INFO)
    model = Counting(length, epochs)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    try:
        manager = Manager(
            pg=ProcessGroupGloo(),
            state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
            load_state_dict=load,
            timeout=timedelta(seconds=20),
        )
        try:
            run(manager, model, inner)
        finally:
            manager.shutdown()
    except JobFinishedError:  # the others were done before this one was back
        say("done", "late", 0)
    return 0


def run(manager: Manager, model: Counting, inner: torch.optim.Optimizer) -> None:
    env = os.environ
    loader = ElasticDataLoader(
        Numbers(model.length), int(env["BATCH"]), shuffle=True, seed=3, manager=manager,
        global_batch_size=int(env["GLOBAL"]) if env.get("GLOBAL") else None, num_workers=int(env.get("WORKERS", "0")),
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    say("ready", manager.replica_id)
    for epoch in loader.epochs(int(env["EPOCHS"])):
        say("epoch", epoch)
        train(manager, loader, model, ddp, optimizer)
    manager.leave("finished", finished=True)
    loader.close()
    faults = model.faults()
    say("faults", len(faults), *faults)
    say("done", hashlib.sha256(model.counts.detach().numpy().tobytes()).hexdigest()[:16], 0)


def train(
    manager: Manager, loader: ElasticDataLoader, model: Counting, ddp: torch.nn.Module, optimizer: Optimizer
) -> None:
    pace, step_s = threading.Event(), float(os.environ["SLOW_STEP_MS"]) / 1000
    hurry = pathlib.Path(os.environ["STEPS_FILE"])
    fresh = True
    for batch in loader:
        if fresh:
            optimizer.zero_grad()
        fresh = loader.last_micro_batch
        if not loader.last_micro_batch:
            with ddp.no_sync():  # type: ignore[operator]
                model.loss(ddp, loader, batch).backward()
            continue
        if not hurry.exists():
            pace.wait(step_s)
        model.loss(ddp, loader, batch).backward()
        optimizer.step()
        if optimizer.committed:
            lineage = manager.state_dict()["lineage"]
            say("commit", manager.current_step(), manager.num_participants(), f"{lineage:x}", 0)
        else:
            say("veto", manager.current_step(), 0)


if __name__ == "__main__":
    sys.exit(main())
