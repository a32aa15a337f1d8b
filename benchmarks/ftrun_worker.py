"""What ftrun runs in its benchmark: a script as users write it, with a model of 10 k parameters, that notes its stages.

Notes go to the file BENCH_NOTES ({group} and {pid} are replaced), as `trainer.py` writes them: begin (the script's
first line runs), imported, built (model and optimizer), manager, commit (step, participants). Every step sleeps for
PAUSE_S, as a step on a GPU would: the processors are there for what is measured. `--alone` ends it before the Manager.
BENCH_RESIDENT_MB: memory that it only holds.
"""

# ruff: noqa: E402

import time

BEGIN = time.monotonic()

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

PAUSE_S = 0.01


def main() -> None:
    pattern = os.environ["BENCH_NOTES"]
    notes = os.open(
        pattern.format(group=os.environ.get("FT_REPLICA_GROUP", "-"), pid=os.getpid()),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    )

    def note(kind: str, text: str = "", at: float = 0.0) -> None:
        os.write(notes, f"{at or time.monotonic():.6f} {kind} {text}\n".encode())

    note("begin", at=BEGIN)
    note("imported")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 10))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    resident = torch.ones(int(os.environ.get("BENCH_RESIDENT_MB", "0")) * 250_000)
    note("built")
    if "--alone" in sys.argv:
        return

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        timeout=timedelta(seconds=30),
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    note("manager")
    assert resident.numel() == 0 or resident[-1] == 1.0  # held until here
    while True:
        optimizer.zero_grad()
        ddp(torch.randn(32, 64)).square().mean().backward()
        time.sleep(PAUSE_S)
        optimizer.step()
        if optimizer.committed:
            note("commit", f"{manager.current_step()} {manager.num_participants()}")


if __name__ == "__main__":
    main()
