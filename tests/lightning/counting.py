"""A LightningModule that counts what it was taught: tests.data.managed's model, and data that are their own numbers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import lightning as pl
import torch
from torch.utils.data import Dataset

from tests.data.managed import Counting

if TYPE_CHECKING:
    from torch import Tensor


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Counts(pl.LightningModule):
    """After SGD with a rate of one, a parameter is how often its sample went into a committed step of its epoch."""

    def __init__(self, length: int, epochs: int) -> None:
        super().__init__()
        self.net = Counting(length, epochs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        loader: Any = self.trainer.train_dataloader
        loss: Tensor = self.net(batch + loader.epoch * self.net.length) * loader.step_samples
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)

    def digest(self) -> str:
        return hashlib.sha256(self.net.counts.detach().numpy().tobytes()).hexdigest()[:12]
