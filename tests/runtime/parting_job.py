"""A trainer process for `test_parting_processes`: several short runs, each in a room of its own, that end at once.

ROUNDS: how many. All but the last end with `shutdown(wait=False)` right after the last commit, the last one with the
interpreter. Prints `round NUMBER DIGEST STEP BATCHES` for each, and `done`.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS = 3


def run(number: int) -> Manager:
    inner_model = nn.Linear(3, 4)
    inner = torch.optim.Adam(inner_model.parameters())

    def load_state(state: dict[str, Any]) -> None:
        inner_model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        ProcessGroupGloo(), load_state, lambda: {"model": inner_model.state_dict(), "optim": inner.state_dict()},
        timeout=timedelta(seconds=20), room_id=f"round{number}",
    )  # fmt: skip
    model, optim = DistributedDataParallel(manager, inner_model), Optimizer(manager, inner)
    while manager.current_step() < STEPS:
        optim.zero_grad()
        model(torch.rand(2, 3)).sum().backward()
        optim.step()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in inner_model.parameters())).hexdigest()[:16]
    print("round", number, digest, manager.current_step(), manager.batches_committed(), flush=True)
    return manager


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in range(int(os.environ["ROUNDS"])):
        last = run(number)
        if number + 1 < int(os.environ["ROUNDS"]):
            last.shutdown(wait=False)
    print("done", "all", flush=True)
