"""The program of test_cli.py: LightningCLI as a user would write it.

Prints `step N MEMBERS`, and at the end `done STEP DIGEST`. Group 0 kills itself once, as DIES says: "in a step", in
which group 1 waits for its gradients; or "before it logs" the one before, while group 1 is between two steps.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import threading
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

from ft_core.protocol.rank.phases import Phase
from tests.lightning.meeting import clock, wait_for

warnings.filterwarnings("ignore")
AT = 20
"""Steps that were made when it dies."""


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
        self.there = self.last.with_name("there")
        """Group 1 is where group 0 dies."""

    def meets(self, where: str) -> bool:
        """Group 0 dies here; True: this is group 1, and does so."""
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if not first or self.trainer.global_step != AT or where != os.environ["DIES"]:
            return False
        if os.environ["FT_REPLICA_GROUP"] == "0":
            wait_for(self.there.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if os.environ["FT_REPLICA_GROUP"] == "1" and self.meets("in a step"):
            threading.Thread(target=self.reports_that_it_waits, daemon=True).start()

    def reports_that_it_waits(self) -> None:
        rank = self.trainer.strategy.manager._runtime.rank
        wait_for(lambda: rank.phase is Phase.REDUCING)
        self.there.touch()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if os.environ["FT_REPLICA_GROUP"] == "0":
            self.meets("in a step")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print("step", self.trainer.global_step, self.trainer.strategy.manager.num_participants(), flush=True)
        if self.meets("before it logs"):
            self.there.touch()
            wait_for(lambda: self.trainer.strategy.manager._runtime.rank.broken)
        clock.wait(0.01)
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
