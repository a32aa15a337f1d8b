"""A Lightning script for tests with real processes: saves, logs, stops early. Its wishes come as JSON in $WISHES.

Prints `step N MEMBERS` after each batch, `saved NAME`, and at the end `done STEP DIGEST BEST LAST LEADS`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import signal
import sys
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from ft_lightning import FaultTolerantStrategy

warnings.filterwarnings("ignore")
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
WISHES: dict[str, Any] = json.loads(os.environ["WISHES"])
GROUP = os.environ["FT_REPLICA_GROUP"]
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.save_hyperparameters({"lr": 0.1})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Act(L.Callback):
    """What the test wants to happen here."""

    batches = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        print("step", step, trainer.strategy.manager.num_participants(), flush=True)
        at = WISHES.get(f"{GROUP}@{step}") if FIRST else None
        if at == "raise":
            raise ValueError("as the test wants it")
        if at == "interrupt":
            signal.raise_signal(signal.SIGINT)
        self.batches += 1
        if at == "stop" or (not FIRST and self.batches == WISHES.get("batches_after_restart")):
            trainer.should_stop = True


class Saves(ModelCheckpoint):
    """Dies while it saves, before the file is there, if the test wants that."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if trainer.is_global_zero:
            print("saves", os.path.basename(filepath), flush=True)
            if FIRST and WISHES.get(f"{GROUP}@save") == os.path.basename(filepath):
                os.kill(os.getpid(), signal.SIGKILL)
        super()._save_checkpoint(trainer, filepath)


class Disk(TorchCheckpointIO):
    """Full while some files are written."""

    def save_checkpoint(self, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if any(f".{name}." in os.path.basename(path) for name in WISHES.get("full", ())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().save_checkpoint(checkpoint, path, *args, **kwargs)


def main() -> None:
    torch.set_num_threads(1)
    L.seed_everything(int(GROUP), verbose=False)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator)
    )
    train, val = torch.utils.data.DataLoader(data, 4, shuffle=True), torch.utils.data.DataLoader(data, 32)
    saves = Saves(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    callbacks: list[Any] = [Act(), saves]
    if "patience" in WISHES:
        # Different thresholds on the replicas: they do not want to stop at the same time.
        threshold = WISHES["patience"].get(GROUP)
        callbacks.append(EarlyStopping("val_loss", stopping_threshold=threshold, patience=1000))
    root = os.path.join(WISHES["root"], GROUP) if WISHES.get("own_disk") else WISHES["root"]
    trainer = L.Trainer(
        strategy=FaultTolerantStrategy(), accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=WISHES.get("epochs", 3), plugins=[Disk()],
        callbacks=callbacks, logger=CSVLogger(root), default_root_dir=root, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), train, val, ckpt_path=WISHES.get("ckpt", {}).get(GROUP))
    parameters = b"".join(p.detach().numpy().tobytes() for p in trainer.lightning_module.parameters())
    digest = hashlib.sha256(parameters).hexdigest()[:12]
    names = [os.path.relpath(path, root) for path in (saves.best_model_path, saves.last_model_path)]
    print("done", trainer.global_step, digest, *names, trainer.is_global_zero, flush=True)
    if "after" in WISHES:
        if trainer.is_global_zero:
            signal.raise_signal(signal.SIGKILL)
        path = os.path.join(root, WISHES["after"])
        trainer.save_checkpoint(path)
        found = Model.load_from_checkpoint(path)
        print("found", all(map(torch.equal, found.parameters(), trainer.lightning_module.parameters())), flush=True)


if __name__ == "__main__":
    main()
