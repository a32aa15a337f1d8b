"""A trainer process that follows the trajectory: dropout, random augmentation, AdamW, clipping, a schedule.

Prints `commit STEP PARTICIPANTS LINEAGE RANK`, `loss STEP HEX`, `veto STEP`, `done DIGEST RANK`. Environment:
SLOW_STEP_MS (how long a step takes at least until STEPS_FILE exists), WORKERS (of the loader), LOG.
"""

from __future__ import annotations

import logging
import os
import pathlib
import sys
import threading
from datetime import timedelta
from typing import Any

import torch

from ft_core import Manager, Optimizer, ProcessGroupGloo
from ft_core.data import ElasticDataLoader
from ft_core.data.seeded_dataset import SeededDataset
from ft_core.errors import JobFinishedError
from ft_core.fixed_order import FixedOrderDataParallel
from tests.fixed_order import reference
from tests.fixed_order.reference import Job, Points


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main() -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if os.environ.get("LOG"):
        logging.basicConfig(level=logging.INFO)
    job = reference.PROCESSES
    torch.manual_seed(0)
    model = job.build()
    inner = job.optim(model)
    schedule = job.schedule(inner)
    assert schedule is not None

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])
        schedule.load_state_dict(state["schedule"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": inner.state_dict(), "schedule": schedule.state_dict()}

    try:
        manager = Manager(pg=ProcessGroupGloo(), state_dict=save, load_state_dict=load, timeout=timedelta(seconds=20))
        try:
            train(manager, job, model, inner, schedule)
        finally:
            manager.shutdown()
    except JobFinishedError:  # the others were done before this one was back
        say("done", "late", 0)
    return 0


def train(manager: Manager, job: Job, model: torch.nn.Module, inner: torch.optim.Optimizer, schedule: Any) -> None:
    loader = ElasticDataLoader(
        SeededDataset(Points(job.length, noise=job.noise), seed=job.seed), job.batch_size, shuffle=True, seed=job.seed,
        manager=manager, global_batch_size=job.global_batch_size, fixed_micro_batches=True,
        num_workers=int(os.environ.get("WORKERS", "0")),
    )  # fmt: skip
    wrapped, optimizer = FixedOrderDataParallel(manager, model, loader), Optimizer(manager, inner)
    pace, step_s = threading.Event(), float(os.environ["SLOW_STEP_MS"]) / 1000
    hurry = pathlib.Path(os.environ["STEPS_FILE"])
    say("ready", manager.replica_id)
    for _epoch in loader.epochs(job.epochs):
        for batch in loader:
            loss = job.loss(wrapped, batch)
            wrapped.record_loss(loss)
            loss.backward()
            if not loader.last_micro_batch:
                continue
            if not hurry.exists():
                pace.wait(step_s)
            job.clip(model)
            optimizer.step()
            if not optimizer.committed:
                say("veto", manager.current_step())
                continue
            schedule.step()
            assert wrapped.step_loss is not None
            say("loss", manager.current_step(), wrapped.step_loss.hex())
            lineage = manager.state_dict()["lineage"]
            say("commit", manager.current_step(), manager.num_participants(), f"{lineage:x}", 0)
    manager.leave("finished", finished=True)
    loader.close()
    say("done", reference.digest(model.state_dict(), inner.state_dict()), 0)


if __name__ == "__main__":
    sys.exit(main())
