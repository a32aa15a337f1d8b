"""A Lightning training script for test_taking_over: prints what it trains on, ends in the epoch that a file names.

Lines: `on GROUP EPOCH BATCH PARTICIPANTS RANK/SHARDS SAMPLES`, `veto EPOCH BATCH`, `validating EPOCH BATCH`,
`done DIGEST`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import threading
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

SAMPLES, BATCH, ACCUMULATE = 336, 4, 2
GROUP = int(os.environ["FT_REPLICA_GROUP"])
RANKS = int(os.environ["LOCAL_WORLD_SIZE"])
END = pathlib.Path(os.environ["END_FILE"])
"""Holds the number of the epoch after which training ends, once that is known."""
PACE_S = float(os.environ.get("PACE_S", "0.01"))
VALIDATION_S = float(os.environ.get("VALIDATION_S", "0"))
"""In epoch 1."""
pause = threading.Event()


def say(*words: object) -> None:
    """In one piece: who is killed leaves no half line behind."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Model(pl.LightningModule):
    """Dropout-free, so that all randomness is in the order of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, x = batch
        loss: torch.Tensor = (self.net(x) ** 2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        pause.wait(PACE_S)
        strategy: Any = self.trainer.strategy
        members, place = strategy.manager.num_participants(), strategy.distributed_sampler_kwargs
        shard = f"{place['rank']}/{place['num_replicas']}"
        say("on", GROUP, self.current_epoch, batch_idx, members, shard, *ids.tolist())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del outputs, batch
        strategy: Any = self.trainer.strategy
        if strategy.step_vetoed and (batch_idx + 1) % ACCUMULATE == 0:
            say("veto", self.current_epoch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            say("validating", self.current_epoch, self.trainer.fit_loop.batch_idx)
            pause.wait(VALIDATION_S if self.current_epoch == 1 else 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        del batch_idx
        self.log("val", (self.net(batch[1]) ** 2).mean())

    def on_train_epoch_start(self) -> None:
        if END.exists():
            self.trainer.fit_loop.max_epochs = int(END.read_text()) + 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train until told."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(GROUP)
    numbers = torch.arange(SAMPLES)
    x = torch.stack([numbers % 7, numbers % 11, numbers % 13], 1) / 10
    data = TensorDataset(numbers, x)
    trainer = pl.Trainer(
        strategy="fault_tolerant", accelerator="cpu", devices=RANKS, max_epochs=10_000, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=ACCUMULATE, val_check_interval=10, num_sanity_val_steps=1,
        callbacks=[pl.pytorch.callbacks.EarlyStopping("val", patience=10**6)],
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(data, BATCH, shuffle=True), DataLoader(data, 64))
    scheduler = trainer.lr_scheduler_configs[0].scheduler.last_epoch if trainer.lr_scheduler_configs else None
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values()))
    say("done", digest.hexdigest()[:12], trainer.global_step, trainer.current_epoch, scheduler)


if __name__ == "__main__":
    main()
