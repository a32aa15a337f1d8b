"""positions_job on elastic data: a death meets one survivor inside a batch and the other one between two.

Three groups make a step of one micro-batch each, two need two. Lines besides: `made EPOCH BATCH GLOBAL_STEP`,
`counted FAULTS DIGEST`.
"""

from __future__ import annotations

from typing import Any

import lightning as pl
import torch
from torch.utils.data import DataLoader

from ft_lightning import FaultTolerantStrategy
from tests.lightning import positions_job
from tests.lightning.counting import Counts, Numbers

LENGTH, EPOCHS = 72, 3
positions_job.PINNED = True  # its samples are divided for the quorum that it is in


class Model(positions_job.Model):
    """Counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts(LENGTH, EPOCHS).net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        super().training_step([torch.zeros(1, 3)], batch_idx)
        loader: Any = self.trainer.train_dataloader
        loss: torch.Tensor = self.counts(batch + loader.epoch * LENGTH) * loader.step_samples
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        strategy: Any = self.trainer.strategy
        loader: Any = self.trainer.train_dataloader
        if loader.last_micro_batch and not strategy.step_vetoed:
            print("made", self.current_epoch, batch_idx, self.global_step, flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)


def main() -> None:
    """Three epochs of six batches, and what two groups make of the rest of one."""
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        strategy=FaultTolerantStrategy(elastic_data=True, global_batch_size=12), accelerator="cpu", devices=1,
        max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(Numbers(LENGTH), 4, shuffle=True))
    print("counted", len(model.counts.faults()), trainer.global_step, flush=True)


if __name__ == "__main__":
    main()
