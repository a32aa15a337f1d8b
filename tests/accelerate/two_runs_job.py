"""Two trainings with one Accelerator, `free_memory` between them; group 1 kills itself in the second one, once.

Lines: `run N: STEPS COMMITTED DIGEST`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

from ft_accelerate import FaultTolerantAccelerator as Accelerator

FATAL = os.environ["FT_REPLICA_GROUP"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
EPOCHS = (1, 12)
SAMPLES = 96


def digest(model: torch.nn.Module) -> str:
    """Of all parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]


def train(accelerator: Accelerator, run: int) -> None:
    """One training. Each process draws a model of its own."""
    bare = torch.nn.Linear(4, 1)
    data = TensorDataset(torch.arange(SAMPLES * 4.0).view(SAMPLES, 4) / 1000)
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters()), DataLoader(data, 4))
    steps = 0
    for _ in accelerator.epochs(EPOCHS[run]):
        for (batch,) in loader:
            optimizer.zero_grad()
            accelerator.backward((model(batch) - 1).square().mean())
            optimizer.step()
            steps += not accelerator.optimizer_step_was_skipped
            assert accelerator.manager is not None
            alone = len(accelerator.manager.members) < 2
            threading.Event().wait(0.1 if alone else 0.02)  # the others are in the run when the killed one is back
            if FATAL and run == 1 and steps == 5:
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"run {run}: {accelerator.committed_steps} {digest(bare)}", flush=True)
    accelerator.free_memory(model, optimizer, loader)


def main() -> None:
    """All trainings."""
    torch.manual_seed(os.getpid())
    accelerator = Accelerator(cpu=True)
    for run in range(len(EPOCHS)):
        train(accelerator, run)
    accelerator.end_training()


if __name__ == "__main__":
    main()
