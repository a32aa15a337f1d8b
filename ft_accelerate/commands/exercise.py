"""The training that `ft-accelerate test` runs: one group kills itself, comes back, and all end with the same model.

How it works. Every replica group trains the same small model from a seed of its own. Group VICTIM kills itself with
SIGKILL after KILL_AT commits of its first life; in its second life it heals, trains STAY more commits with the others,
and raises accelerate's trigger, at which all stop together. What each process ends with is written to a file.

Run by ftrun as `--module ft_accelerate.commands.exercise FOLDER`. Threads: the training thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate.accelerator import FaultTolerantAccelerator

if TYPE_CHECKING:
    from collections.abc import Callable

VICTIM = 1
KILL_AT = 20
STAY = 20
EPOCHS = 2000
"""A bound: the victim is back long before."""
PACE_S = 0.01
"""A step of a real model takes longer, too; without it the others would take the cores from the process that starts."""
SAMPLES, FEATURES, BATCH = 2048, 16, 4


def main(folder: Path) -> None:
    """Train, and write `folder`/GROUP-RANK.json."""
    accelerator = FaultTolerantAccelerator(gradient_accumulation_steps=2)
    group = accelerator.replica_group
    marker = folder / "killed"
    victim, killed = group == VICTIM, marker.exists()
    torch.manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh()), BATCH, shuffle=True)
    torch.manual_seed(group)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    began = -1
    for _ in accelerator.epochs(EPOCHS):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            began = accelerator.committed_steps if began < 0 else began
            if victim and not killed and accelerator.committed_steps >= KILL_AT:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if victim and killed and accelerator.committed_steps >= began + STAY:
                accelerator.set_trigger()
            time.sleep(PACE_S)
            if accelerator.sync_gradients and accelerator.check_trigger():
                _end(accelerator, model, folder)
                return
    raise RuntimeError(f"replica group {VICTIM} did not come back within {accelerator.committed_steps} steps")


def _end(accelerator: FaultTolerantAccelerator, model: nn.Module, folder: Path) -> None:
    result = {"steps": accelerator.committed_steps, "digest": digest(accelerator.unwrap_model(model).state_dict)}
    accelerator.end_training()
    name = f"{accelerator.replica_group}-{accelerator.process_index}.json"
    (folder / name).write_text(json.dumps(result))


def digest(state_dict: Callable[[], dict[str, torch.Tensor]]) -> str:
    """A digest of all parameters and buffers, as text."""
    out = hashlib.sha256()
    for name, value in sorted(state_dict().items()):
        out.update(name.encode())
        out.update(value.detach().cpu().contiguous().numpy().tobytes())
    return out.hexdigest()[:16]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
