"""Handwritten digits with Lightning, trained by replica groups that may die at any time.

    python examples/lightning/train.py                    three replica groups on this machine
    ftrun --replicas 3 examples/lightning/train.py        the same, with ftrun's options
    python examples/lightning/train.py --strategy ddp     plain Lightning, for comparison

What makes it fault tolerant is one word: `Trainer(strategy="fault_tolerant")`. Kill any of the processes with
`kill -9`: the others keep training, it is started again and takes over their run in the middle of the epoch. One of
them writes checkpoints, metrics.csv and the log line; if that one dies, another goes on writing. At the end all
replicas print the same digest.

The data are scikit-learn's: 1797 images of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import pathlib
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from ft_lightning import FaultToleranceMonitor


class Digits(L.LightningDataModule):
    """Training and validation data; Lightning divides the former among all ranks of all replica groups."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Loads from the package, not from the network."""
        del stage
        digits: Any = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).div_(16.0)
        data = TensorDataset(images.flatten(1), torch.tensor(digits.target))
        self.train, self.val = random_split(data, [1500, 297], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The same on every replica: all decide alike."""
        return DataLoader(self.val, 99)


class Classifier(L.LightningModule):
    """Two hidden layers."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy."""
        del batch_idx
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Loss and accuracy."""
        del batch_idx
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW with a schedule by steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 500))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategy", default="fault_tolerant")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--devices", type=int, default=0, help="default: 3, or 1 under ftrun and torchrun")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path("digits"), help="for checkpoints and metrics")
    parser.add_argument("--resume", action="store_true", help="go on from last.ckpt, if there is one")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    return parser.parse_args()


def main() -> None:
    args = options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    launched = torch.distributed.is_torchelastic_launched()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices or (1 if launched else 3),
        max_epochs=args.epochs,
        callbacks=[
            ModelCheckpoint(args.dir, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("val_loss", patience=8),
            FaultToleranceMonitor(),
        ],
        logger=CSVLogger(args.dir, name="logs"),
        log_every_n_steps=5,
        enable_progress_bar=args.progress,
    )
    last = args.dir / "last.ckpt"
    model = Classifier(args.width, args.lr)
    trainer.fit(model, datamodule=Digits(args.batch_size), ckpt_path=last if args.resume and last.exists() else None)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    metrics = {name: round(float(value), 4) for name, value in trainer.callback_metrics.items() if "val" in name}
    print(f"done: step {trainer.global_step}, epoch {trainer.current_epoch}, {metrics}, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
