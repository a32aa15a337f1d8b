"""A Trainer whose evaluation is shared, and what its metrics are on each group. Options are NAME=VALUE in OPTIONS.

share: 0 or 1. loaders: of validation. signal: NUMBER:GROUP:VALIDATION:BATCH, which that group's first process sends
itself there. epochs, workers, devices, limit, accumulate, every (val_check_interval), shuffle (each group in its own
order), correlation (a metric whose state cannot be merged), reshuffle (in another order each epoch).
Prints `validated STEP BATCHES METRICS`, METRICS as hexadecimal floats; `tested`; `predicted`.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ft_lightning import FaultTolerantStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTIONS = dict(word.split("=") for word in os.environ.get("OPTIONS", "").split())
SAMPLES, BATCH, FEATURES = 58, 4, 5


class Writer(BasePredictionWriter):
    """Says whether it is given all predictions, and where they belong."""

    def __init__(self) -> None:
        super().__init__("epoch")

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        indices = [index for loader in batch_indices for batch in loader for index in batch]
        print("written", torch.cat(list(predictions)).tolist() == indices == list(range(SAMPLES)), flush=True)


def option(name: str, default: int = 0) -> int:
    return int(OPTIONS.get(name, default))


def data(seed: int, samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, FEATURES, generator=generator), torch.arange(samples))


def signalled_at() -> tuple[int, ...]:
    return tuple(int(n) for n in OPTIONS.get("signal", "0:-1:0:0").split(":"))


class Keeping(torchmetrics.SumMetric):
    """Its reset keeps a state."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", torch.zeros(()), dist_reduce_fx="sum")

    def keep(self, value: float) -> None:
        self.kept = self.kept + value

    def compute(self) -> Tensor:
        return super().compute() + 1000 * self.kept

    def reset(self) -> None:
        kept = self.kept
        super().reset()
        self.kept = kept


class Running(torchmetrics.Metric):
    """The mean over its updates, as a state."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, value: Tensor) -> None:
        self.mean = self.mean + (value - self.mean) / self._update_count

    def compute(self) -> Tensor:
        return self.mean


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.average = torchmetrics.MeanMetric()
        self.all = torchmetrics.CatMetric()
        self.seen = torchmetrics.SumMetric()
        self.training_sum = torchmetrics.SumMetric()
        self.fresh = torchmetrics.SumMetric()
        self.running = Running()
        self.once = torchmetrics.SumMetric()
        self.correlation = torchmetrics.PearsonCorrCoef() if option("correlation") else None
        self.keeping = Keeping()
        self.keeping.keep(1.0)
        self.validations = self.batches = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.training_sum.update(1.0)
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def on_validation_start(self) -> None:
        self.batches = 0
        self.validations += not self.trainer.sanity_checking

    def on_validation_epoch_start(self) -> None:
        self.fresh.reset()
        self.log("started", 1.0, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        group = self.trainer.strategy.replica_group
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and (group, self.validations, self.batches) == signalled_at()[1:]:
            threading.Event().wait(0.3)  # until then the others have committed the step before, too
            os.kill(os.getpid(), signalled_at()[0])
        self.batches += 1
        out = self.layer(batch[0]).flatten()
        self.log("loss", out.square().mean())
        self.log("most", out.max(), reduce_fx="max")
        self.log("count", float(len(out)), reduce_fx="sum")
        self.average.update(out)
        self.log("average", self.average, on_epoch=True)
        self.all.update(batch[1].float() * (1 + dataloader_idx))
        self.seen.update(len(out))
        self.fresh.update(len(out))
        self.keeping.update(len(out))
        self.running.update(out.mean())
        if self.correlation is not None:
            self.correlation.update(out, batch[1].float())
        if batch[1][0] < BATCH:  # in one batch of all
            self.log("rare", out.sum())
            self.once.update(1.0)
            self.log("once", self.once)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("samples", self.all.compute().unique().numel() + 0.0)
            self.log("seen", self.seen.compute())
            self.log("fresh", self.fresh.compute())
            self.log("kept", self.keeping.compute())
            self.log("running", self.running.compute().round(decimals=4))
            if self.correlation is not None:
                self.log("correlation", self.correlation.compute())
            self.running.reset()
            self.keeping.reset()
            self.log("order", (self.all.compute() * torch.arange(1, self.all.compute().numel() + 1)).sum() % 9973)
        self.all.reset()
        self.seen.reset()

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            metrics = {n: float(v).hex() for n, v in sorted(self.trainer.callback_metrics.items()) if "order" not in n}
            steps = self.training_sum.compute().item() > 0
            print(f"validated {self.global_step} {self.batches} {steps} {metrics}", flush=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.log("test", self.layer(batch[0]).square().sum(), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        numbers: Tensor = batch[1]
        return numbers


def main() -> None:
    pl.seed_everything(0)
    strategy = FaultTolerantStrategy(share_evaluation=bool(option("share")), timeout=20)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=option("devices", 1), max_epochs=option("epochs", 2),
        accumulate_grad_batches=option("accumulate", 1), val_check_interval=option("every") or 1.0, logger=False,
        limit_val_batches=option("limit") or 1.0, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Writer()],
    )  # fmt: skip
    module = Module()
    own = torch.Generator().manual_seed(strategy.replica_group)
    order: Any = torch.randperm(SAMPLES, generator=own).tolist() if option("shuffle") else None
    if option("reshuffle"):
        order = DistributedSampler(data(10), num_replicas=1, rank=0)
    loaders = [
        DataLoader(data(10 + i, SAMPLES - 51 * i), BATCH, num_workers=option("workers"),
                   persistent_workers=option("workers") > 0, sampler=order)
        for i in range(option("loaders", 1))
    ]  # fmt: skip
    trainer.fit(module, DataLoader(data(1, 48), BATCH), loaders)
    module.batches = 0
    found = trainer.test(module, DataLoader(data(3), BATCH), verbose=False)
    print("tested", module.batches, found[0]["test"].hex(), flush=True)
    module.batches = 0
    predicted = trainer.predict(module, DataLoader(data(4), BATCH))
    assert predicted is not None
    print("predicted", module.batches, torch.cat(predicted).tolist() == list(range(SAMPLES)), flush=True)


if __name__ == "__main__":
    main()
