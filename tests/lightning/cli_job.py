"""The program of test_cli.py: LightningCLI as a user would write it.

Prints `step N MEMBERS`, and at the end `done STEP DIGEST`.
"""

from __future__ import annotations

import hashlib
import pathlib
import threading
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

warnings.filterwarnings("ignore")


class Model(L.LightningModule):
    """Linear regression.

    Args:
        lr: of SGD.
        last: file that says after which step to end, once that is known.
    """

    def __init__(self, last: str, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.lr, self.last = nn.Linear(4, 2), lr, pathlib.Path(last)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print("step", self.trainer.global_step, self.trainer.strategy.manager.num_participants(), flush=True)
        threading.Event().wait(0.01)
        self.trainer.should_stop = self.last.exists() and self.trainer.global_step >= int(self.last.read_text())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(L.LightningDataModule):
    """Random numbers."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(64, 4, generator=generator), torch.randint(0, 2, (64,), generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)


def main() -> None:
    torch.set_num_threads(1)
    trainer = LightningCLI(Model, Data).trainer
    parameters = b"".join(p.detach().numpy().tobytes() for p in trainer.lightning_module.parameters())
    print("done", trainer.global_step, hashlib.sha256(parameters).hexdigest()[:12], flush=True)


if __name__ == "__main__":
    main()
