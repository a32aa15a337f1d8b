"""One replica behind `lightning_kill.py`: a Trainer that notes every commit, until it is killed."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ft_lightning  # noqa: F401 - registers the strategy, also where the package is not installed
from benchmarks.lightning_kill import PACE_MS
from benchmarks.trainer import Notes


class Digits(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        del batch_idx
        x, y = batch
        time.sleep(PACE_MS / 1e3)
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Commits(pl.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self._notes = Notes()

    def on_train_start(self, *_: Any) -> None:
        self._notes.note("ready")

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        strategy = trainer.strategy
        if strategy.step_vetoed:
            self._notes.note("veto")
        else:
            self._notes.note("commit", f"{trainer.global_step} {strategy.manager.num_participants()}")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(int(os.environ["FT_REPLICA_GROUP"]), verbose=False)
    data = TensorDataset(torch.randn(60_000, 64), torch.randint(0, 10, (60_000,)))
    trainer = pl.Trainer(
        strategy="fault_tolerant", accelerator="cpu", devices=1, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Commits()],
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(data, 32, shuffle=True))


if __name__ == "__main__":
    main()
