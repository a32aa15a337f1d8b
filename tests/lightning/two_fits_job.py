"""Calls Lightning's `fit` twice, GAP_S apart; in one of them (KILL: "<fit> <group>") a group kills itself once.

With SIGNAL=SIGSTOP it freezes, until the other is in the second fit.

Lines: `begins N DIGEST`, before the first batch, and `fit N DIGEST STEPS`.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import threading
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

GROUP = int(os.environ["FT_REPLICA_GROUP"])
KILLED = pathlib.Path(os.environ["FOLDER"]) / "killed"
KILL = tuple(map(int, os.environ["KILL"].split()))
SIGNAL = signal.Signals[os.environ.get("SIGNAL", "SIGKILL")]
clock = threading.Event()


class Model(pl.LightningModule):
    """In the second fit the others wait in step 3 until the killed one is back."""

    fits = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        if batch_idx == 0 and self.trainer.global_step == 0:
            print("begins", self.fits, digest(self), flush=True)
        if batch_idx == 2 and (self.fits, GROUP) == KILL and not KILLED.exists():
            KILLED.write_text(str(os.getpid()))
            os.kill(os.getpid(), SIGNAL)
        if self.fits == 1 and batch_idx == 6 and KILL[1] != GROUP and SIGNAL == signal.SIGSTOP:
            os.kill(int(KILLED.read_text()), signal.SIGCONT)
        if self.fits == 1 and batch_idx == 2 and os.environ.get("FAIL"):
            raise ValueError("a mistake in the second fit")
        if self.fits == 1 and batch_idx > 4:  # a newcomer gets in between two steps
            clock.wait(0.1 if strategy.manager.num_participants() < 2 else 0)
        loss: torch.Tensor = (self.net(batch[0]) ** 2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]


def main() -> None:
    """Two fits of one model."""
    torch.set_num_threads(1)
    torch.manual_seed(GROUP)
    model = Model()
    for n, steps in enumerate((4, 100)):
        Model.fits = n
        trainer = pl.Trainer(
            strategy="fault_tolerant", accelerator="cpu", devices=1, max_steps=steps, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, DataLoader(TensorDataset(torch.arange(600.0).view(200, 3) / 100), 1))
        print("fit", n, digest(model), trainer.global_step, flush=True)
        clock.wait(float(os.environ["GAP_S"]) if n == 0 else 0)


if __name__ == "__main__":
    main()
