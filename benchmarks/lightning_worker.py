"""One of the processes behind `lightning.py`: one `fit` that trains a block of steps for each line on standard input.

Started by `lightning.py`: python -m benchmarks.lightning_worker ddp|fault_tolerant
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ft_lightning  # noqa: F401 - registers the strategy, also where the package is not installed
from benchmarks.common import median
from benchmarks.lightning import BLOCKS, STEPS

SAMPLES, BATCH = 20_000, 32


class Digits(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        del batch_idx
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Blocks(pl.Callback):  # type: ignore[misc]
    """Notes the median step time after each block, the first of which is the warm-up, and waits for the next order."""

    def __init__(self) -> None:
        self._notes = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._times: list[float] = []
        self._started = 0.0

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if self._started:
            self._times.append(now - self._started)
        self._started = now
        if len(self._times) == STEPS:
            os.write(self._notes, f"{time.monotonic():.6f} block {json.dumps(median(self._times))}\n".encode())
            self._times.clear()
            sys.stdin.readline()
            self._started = 0.0


def main(strategy: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,)))
    devices = 2 if strategy == "ddp" else 1
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=-1, max_steps=(BLOCKS + 1) * (STEPS + 1) + 1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Blocks()],
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(data, BATCH, shuffle=True))


if __name__ == "__main__":
    main(sys.argv[1])
