"""One of the processes behind test_elastic.py: trains every mode it is told to on elastic data, one after another.

    python elastic_worker.py DEVICES FOLDER NUMBER MODE=LIGHTHOUSE[#STORE] ...

The environment says which group and rank this is. FOLDER/MODE.NUMBER holds the parameters, what was counted, and the
samples of this rank in each step that was committed.
"""

from __future__ import annotations

import os
import pathlib
import sys
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import ft_lightning
from ft_core.data import ElasticDataLoader
from ft_lightning.trainer import leader_files

LENGTH, BATCH, EPOCHS, SEED = 47, 4, 2, 11
RATE, MOMENTUM, CLIP = 0.1, 0.9, 0.5
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "plain-vetoed": ({}, {}),
    "accumulate": ({}, {"accumulate_grad_batches": 2}),
    "accumulate-vetoed": ({}, {"accumulate_grad_batches": 2}),
    "global": ({"global_batch_size": 13}, {}),
    "global-vetoed": ({"global_batch_size": 13}, {}),
    "scaled": ({"lr_scaling": "sqrt", "reference_batch_size": 6}, {}),
    "own": ({}, {}),
}
"""Arguments of the strategy, and of the Trainer."""


EXHAUSTED = ("shadow", "stop_all", "leave")
"""Modes in which group g has g + 3 batches of its own in an epoch; not on elastic data."""


class Samples(Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i with its number."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(LENGTH, 6, generator=draw), torch.randn(LENGTH, 1, generator=draw)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def network() -> nn.Module:
    """The same everywhere."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean over the batch."""
    return nn.functional.mse_loss(net(x), y)


class Model(L.LightningModule):
    """Notes what was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.committed: list[tuple[int, list[int]]] = []
        self.lengths: list[tuple[int, int, bool]] = []
        self.rates: list[float] = []
        self._window: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loader: Any = self.trainer.train_dataloader
        if loader.sampler.first_micro_batch:
            self._window = []
        self._window += batch[0].tolist() if loader.sampler.weight else []
        return loss_of(self.net, *batch[1:])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.committed.append((self.current_epoch, self._window))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer: Any = self.trainer
        self.lengths.append((batch_idx, trainer.num_training_batches, trainer.is_last_batch))
        assert trainer.optimizers[0].param_groups[0]["lr"] == RATE

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), RATE, MOMENTUM)


class Uneven(L.LightningModule):
    """Every group has a loader of its own. Notes the loss of each step that was made with gradients of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.rates: list[float] = []
        self.ends: list[tuple[int, int, int]] = []

    def train_dataloader(self) -> Any:
        group = int(os.environ["FT_REPLICA_GROUP"])
        return DataLoader(Subset(Samples(), range(10 * group, 10 * group + 2 * (group + 3))), 2)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(), LENGTH)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", loss_of(self.net, *batch[1:]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, *batch[1:])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        val = round(1e6 * float(self.trainer.callback_metrics["val"]))
        self.ends.append((self.current_epoch, self.trainer.global_step, val))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), RATE, MOMENTUM)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        epoch = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], 0.5)
        configs = [{"scheduler": step, "interval": "step", "frequency": 2}, {"scheduler": epoch, "interval": "epoch"}]
        return [optimizer], configs


def exhaust(policy: str) -> dict[str, Any]:
    """One run with uneven loaders; what is compared."""
    model = Uneven()
    strategy = ft_lightning.FaultTolerantStrategy(on_exhausted=policy, min_replicas=1)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=CLIP, use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model)
    return {
        "model": {key: value.clone() for key, value in model.net.state_dict().items()}, "ends": model.ends,
        "global_step": trainer.global_step, "rates": model.rates, "vetoed": strategy.vetoed_steps,
    }  # fmt: skip


class Faults(Callback):
    """Group 1 reports an error in some batches."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 4, 5) and os.environ["FT_REPLICA_GROUP"] == "1":
            trainer.strategy.manager.report_error(RuntimeError("injected by the test"))


def train(mode: str, devices: int) -> dict[str, Any]:
    """One run; what is compared."""
    strategy_options, options = MODES[mode]
    L.seed_everything(SEED, verbose=False)
    model, own = Model(), mode == "own"
    strategy = ft_lightning.FaultTolerantStrategy(elastic_data=not own, **strategy_options)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=CLIP,
        callbacks=[Faults()] if mode.endswith("vetoed") else [], **options,
    )  # fmt: skip
    loader: Any = DataLoader(Samples(), BATCH, shuffle=True)
    if own:
        loader = ElasticDataLoader(Samples(), BATCH, shuffle=True, seed=SEED, num_workers=1)
    trainer.fit(model, loader)
    return {
        "model": {key: value.clone() for key, value in model.net.state_dict().items()},
        "global_step": trainer.global_step, "committed": model.committed, "lengths": model.lengths,
        "rates": model.rates, "vetoed": strategy.vetoed_steps,
    }  # fmt: skip


def main(devices: int, folder: pathlib.Path, number: int, words: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    leader_files.BROADCAST_EVERY = 1  # after each vote, whatever led to it: all who vote take part
    for count, word in enumerate(words):
        mode, _, places = word.partition("=")
        os.environ["FT_LIGHTHOUSE"], _, store = places.partition("#")
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(count)  # in the group's store: another start of it
        if store:
            os.environ |= {"MASTER_PORT": store, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        torch.save(exhaust(mode) if mode in EXHAUSTED else train(mode, devices), folder / f"{mode}.{number}")
        print(f"{mode} done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
