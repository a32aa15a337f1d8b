"""A training loop of one's own, fault tolerant.  ftrun --replicas 3 examples/own_loop/train.py

Kill a worker (`kill -9` of a pid that it prints): the others train on, it comes back and goes on at their batch.
"""

import os
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ft_core.loop import TrainingLoop

BATCHES, SIZE, EVERY = int(os.environ.get("BATCHES", "2000")), 32, 200
FOLDER = Path(os.environ.get("FOLDER", "checkpoints"))


class Progress:
    """Where this replica is in its data; part of the state, so a replica that comes back goes on there."""

    batch = 0

    def state_dict(self) -> dict[str, int]:
        """What the others need."""
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.batch = state["batch"]


model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
progress = Progress()
loop = TrainingLoop({"model": model, "optimizer": optimizer, "progress": progress})
ddp = loop.wrap(model)
FOLDER.mkdir(parents=True, exist_ok=True)
print("pid", os.getpid(), flush=True)

while (batch := loop.open(progress.batch)) is not None and batch < BATCHES:
    progress.batch = batch
    share = torch.Generator().manual_seed(batch * loop.groups + loop.group)  # this replica's part of the batch
    x = torch.randn(SIZE, 8, generator=share)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), x.square().sum(1, keepdim=True))
    loss.backward()
    if not loop.vote():
        continue  # a replica was lost: nothing has changed, and all try this batch again
    optimizer.step()
    progress.batch += 1
    if progress.batch % EVERY == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batch": progress.batch}
        loop.save(FOLDER / f"batch_{progress.batch}.pt", partial(torch.save, saved))
        if loop.leads:
            print(f"batch {progress.batch}: loss {loss.item():.4f}", flush=True)
loop.end()
print("done", progress.batch, f"{sum(p.double().sum().item() for p in model.parameters()):.12f}", flush=True)
