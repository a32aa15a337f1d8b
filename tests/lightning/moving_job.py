"""A Lightning script for test_moving: a replica dies while all are in the forward pass of one batch.

`VICTIM` (a group) kills itself in the forward pass of `DEATH` (epoch, batch) once the others are in theirs, which they
leave in the next quorum. Lines: `moved`, `done DIGEST COMMITTED VETOED LEADS`. The first group's leader logs and saves.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from tests.lightning.meeting import wait_for  # noqa: E402

GROUP = int(os.environ["FT_REPLICA_GROUP"])
VICTIM = int(os.environ["VICTIM"])
ACCUMULATE = int(os.environ["ACCUMULATE"])
FOLDER = pathlib.Path(os.environ["FOLDER"])
DEATH = (1, 9)
"""The second batch of a window of two; not soon after a checkpoint, after which steps stay in their quorum."""


class Model(pl.LightningModule):
    """The others wait for the victim, and it for them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if (self.current_epoch, batch_idx) == DEATH:
            strategy: Any = self.trainer.strategy
            machine = strategy.manager._runtime.rank
            before = machine.quorum_id
            (FOLDER / f"inside-{GROUP}").touch()
            if GROUP == VICTIM:
                wait_for(lambda: all((FOLDER / f"inside-{group}").exists() for group in range(3)))
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for(lambda: machine.quorum_id != before and not machine.forming)
            print("moved", flush=True)
        loss: torch.Tensor = (self.net(batch[0]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    """Three epochs of twelve batches."""
    torch.set_num_threads(1)
    torch.manual_seed(GROUP)
    data = TensorDataset(torch.arange(432.0).view(144, 3) / 100)
    trainer = pl.Trainer(
        strategy="fault_tolerant", accelerator="cpu", devices=1, max_epochs=3, log_every_n_steps=1,
        logger=CSVLogger(FOLDER, "run", version=0, flush_logs_every_n_steps=1), accumulate_grad_batches=ACCUMULATE,
        callbacks=[ModelCheckpoint(FOLDER / "saved", filename="{epoch}", save_top_k=-1)], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(data, 4, shuffle=True))
    strategy: Any = trainer.strategy
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in (*model.parameters(), *model.buffers())))
    made = strategy.committed_steps, strategy.vetoed_steps
    print("done", digest.hexdigest()[:12], *made, strategy.is_global_zero, flush=True)


if __name__ == "__main__":
    main()
