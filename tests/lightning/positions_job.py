"""A Lightning script for test_positions: a replica dies while one survivor is in a batch, the other between two.

`DEATH` (epoch, batch): group 2 kills itself inside that batch; group 0 stands inside it then, group 1 before it.
PINNED: group 0 has asked who takes part, so its step stays in its quorum and is lost; else it goes on in the next one
(R19).
Lines: `step EPOCH BATCH GLOBAL_STEP`, `veto EPOCH BATCH`, `validated EPOCH BATCH`, `done DIGEST STEPS`.
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
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from tests.lightning.meeting import clock, wait_for  # noqa: E402

GROUP = int(os.environ["FT_REPLICA_GROUP"])
FOLDER = pathlib.Path(os.environ["FOLDER"])
PINNED = bool(os.environ.get("PINNED"))
DEATH = (1, 5)
"""The last batch of its epoch."""


def note(what: str, place: tuple[int, int]) -> pathlib.Path:
    return FOLDER / f"{what}-{place[0]}-{place[1]}"


class Model(pl.LightningModule):
    """Meets the others at the places that DEATHS names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        place = (self.current_epoch, batch_idx)
        clock.wait(0.02)
        if place == DEATH and GROUP == 0:
            machine = self.trainer.strategy.manager._runtime.rank
            before = machine.quorum_id
            if PINNED:
                assert self.trainer.strategy.manager.num_participants() == 3
            note("inside", place).touch()
            wait_for(lambda: machine.broken if PINNED else machine.quorum_id != before and not machine.forming)
        if place == DEATH and GROUP == 2:
            wait_for(note("between", place).exists)
            wait_for(note("inside", place).exists)
            os.kill(os.getpid(), signal.SIGKILL)
        loss: torch.Tensor = (self.net(batch[0]) ** 2).mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del outputs, batch
        strategy: Any = self.trainer.strategy
        place = (self.current_epoch, batch_idx)
        what = (
            f"veto {place[0]} {place[1]}" if strategy.step_vetoed else f"step {place[0]} {place[1]} {self.global_step}"
        )
        print(what, flush=True)
        following = (place[0], batch_idx + 1)
        if following == DEATH and GROUP == 1:
            note("between", following).touch()
            wait_for(lambda: strategy.manager._runtime.rank.broken)
            if PINNED:
                wait_for(note("vetoed", following).exists)
        if place == DEATH and GROUP == 0:
            note("vetoed", place).touch()

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            print("validated", self.current_epoch, self.trainer.fit_loop.batch_idx, flush=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        del batch_idx
        self.log("val", (self.net(batch[0]) ** 2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    """Three epochs of six batches."""
    torch.set_num_threads(1)
    torch.manual_seed(GROUP)
    data = TensorDataset(torch.arange(216.0).view(72, 3) / 100)
    trainer = pl.Trainer(
        strategy="fault_tolerant", accelerator="cpu", devices=1, max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 32))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print("done", digest.hexdigest()[:12], trainer.global_step, flush=True)


if __name__ == "__main__":
    main()
