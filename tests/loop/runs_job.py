"""Two trainings with `TrainingLoop` in one script, in groups of any size.

FATAL: where a group is killed, "group:batch" of the second training, at its first start. FUSE: a file; who finds it
while it writes a checkpoint takes it away and dies half-way. VALIDATE_S: how long group 0 validates, alone, after five
batches of the first training. PACE_S: how long a batch takes at least.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from ft_core.loop import TrainingLoop

BATCHES, EVERY = 24, 4
RUNS = 2
FATAL = {int(word.split(":")[0]): int(word.split(":")[1]) for word in os.environ.get("FATAL", "").split()}
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
FOLDER = pathlib.Path(os.environ["FOLDER"])
FUSE = pathlib.Path(os.environ.get("FUSE", "/nowhere"))
PACE_S = float(os.environ.get("PACE_S", "0.02"))
VALIDATE_S = float(os.environ.get("VALIDATE_S", "0"))
RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


class Progress:
    """Of one training."""

    batch = 0

    def state_dict(self) -> dict[str, int]:
        """For who comes back."""
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.batch = state["batch"]


def digest(model: nn.Module) -> str:
    """Of all parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]


def write(saved: dict[str, Any], path: str) -> None:
    """Write a checkpoint, or half of one."""
    torch.save(saved, path)
    if FUSE.exists():
        FUSE.unlink()
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def train(run: int) -> None:
    """One training. Each process draws a model of its own; what it writes is as long as its rank is high."""
    model, progress = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), Progress()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = TrainingLoop({"model": model, "optimizer": optimizer, "progress": progress})
    ddp = loop.wrap(model)
    while (batch := loop.open(progress.batch)) is not None and batch < BATCHES:
        progress.batch = batch
        optimizer.zero_grad()
        share = torch.Generator().manual_seed((batch * loop.groups + loop.group) * RANKS + RANK)
        ddp(torch.randn(8, 4, generator=share)).square().mean().backward()
        time.sleep(PACE_S)
        if not loop.vote():
            print("veto", progress.batch, flush=True)
        else:
            optimizer.step()
            progress.batch += 1
            if run == RUNS - 1 and FIRST and FATAL.get(loop.group) == progress.batch:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress.batch % EVERY == 0:
                saved = {"batch": progress.batch, "model": model.state_dict(), "own": torch.rand(50_000 * (RANK + 1))}
                loop.save(FOLDER / f"run_{run}" / f"{progress.batch}.pt", partial(write, saved))
            if VALIDATE_S and (run, progress.batch, loop.group) == (0, 5, 0):
                with loop.by_itself("validation"):
                    time.sleep(VALIDATE_S)
    loop.end()
    print(f"run {run}: {progress.batch} batches, {loop.committed_steps} steps, {digest(model)}", flush=True)


def main() -> None:
    """All trainings."""
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    for run in range(RUNS):
        train(run)
    if RANKS > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(os.getpid())
    main()
