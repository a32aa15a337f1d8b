"""A trainer process for `test_join_processes`: torch's own example of `Join`, with our model and optimizer.

INPUTS: how many batches it has; STEP_MS: how long one takes at least. Prints `commit STEP`, `joined`, and in the end
`done DIGEST STEP`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def say(*words: object) -> None:
    """In one piece: who is killed leaves no half line behind."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    torch.set_num_threads(1)
    inner_model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    inner = torch.optim.AdamW(inner_model.parameters(), lr=0.01)

    def load_state(state: dict[str, Any]) -> None:
        inner_model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        ProcessGroupGloo(), load_state, lambda: {"model": inner_model.state_dict(), "optim": inner.state_dict()},
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    model, optim = DistributedDataParallel(manager, inner_model), Optimizer(manager, inner)
    inputs = [torch.randn(3, 4) for _ in range(int(os.environ["INPUTS"]))]
    pace = threading.Event()
    with Join([model, optim]):
        for batch in inputs:
            optim.zero_grad()
            loss = model(batch).square().mean()
            pace.wait(float(os.environ.get("STEP_MS", "5")) / 1000)
            loss.backward()
            optim.step()
            say("commit" if optim.committed else "veto", manager.current_step(), 0, "-")
        say("joined")
    tensors = [*inner_model.state_dict().values(), *(s["exp_avg"] for s in inner.state.values())]
    digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]
    say("done", digest, manager.current_step())
    manager.shutdown()


if __name__ == "__main__":
    main()
