"""Trains with one of Lightning's callbacks (WHAT); group 1 kills itself once, in epoch KILL_EPOCH, and comes back.

Lines: `at PLACE MEMBERS DIGEST`, before each step, of parameters, callbacks' states and averaged models; `back STEP`,
where the one that comes back stands at its first batch; `done STEP DIGEST`.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import threading
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch import callbacks as theirs  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import get_ema_avg_fn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

GROUP = int(os.environ["FT_REPLICA_GROUP"])
FOLDER = pathlib.Path(os.environ["FOLDER"])
KILL_EPOCH = int(os.environ.get("KILL_EPOCH", "2"))
EPOCHS, BATCHES = 6, 8
clock = threading.Event()


class Swaps(pl.Callback):
    """An average as users write it: in the checkpoint the module's weights are the averaged ones."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, value in module.state_dict().items():
            mean = self.average.setdefault(name, value.clone())
            mean.copy_(mean.lerp(value, 0.1) if value.is_floating_point() else value)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if self.average:
            checkpoint["own"] = {"weights": checkpoint["state_dict"]}
            checkpoint["state_dict"] = self.average

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if "own" in checkpoint:
            self.average = {name: value.clone() for name, value in checkpoint["state_dict"].items()}
            module.load_state_dict(checkpoint["own"]["weights"])


def callbacks(what: str) -> list[Any]:
    match what:
        case "average":
            return [theirs.WeightAveraging(avg_fn=get_ema_avg_fn(0.9))]
        case "ema":
            return [theirs.EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_epoch=1)]
        case "own average":
            return [Swaps()]
        case "swa":
            return [theirs.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2)]
        case "swa from the start":
            return [theirs.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)]
        case "pruning":
            return [theirs.ModelPruning("l1_unstructured", amount=0.2)]
        case "stopping":
            checkpoint = theirs.ModelCheckpoint(FOLDER / "saved", monitor="val", save_top_k=2, save_last=True)
            return [theirs.EarlyStopping("val", patience=100), checkpoint]
        case "finetuning":
            return [theirs.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)]
        case "accumulation":
            return [theirs.GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})]
    raise ValueError(what)


class Model(pl.LightningModule):
    """Its first layer is the backbone."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.backbone(x))
        return result

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        killed = FOLDER / "killed"
        if GROUP == 1 and self.current_epoch == KILL_EPOCH and batch_idx == 3 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if killed.exists():  # who was killed is to be back before the end
            clock.wait(0.25 if strategy.manager.num_participants() < 2 else 0)
        loss: torch.Tensor = (self(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        del batch_idx
        self.log("val", self(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


def bits(value: Any) -> Any:
    """Of a nested state, comparable as text."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()[:12]
    if isinstance(value, dict):
        return {str(key): bits(item) for key, item in value.items() if "anneal_func" not in str(key)}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def digest(trainer: Any, module: nn.Module) -> str:
    whole: list[Any] = [bits(module.state_dict()), trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:
        if not isinstance(callback, Watch):
            whole.append(bits(callback.state_dict()))
        average = getattr(callback, "_average_model", None)
        whole.append(bits(average.state_dict()) if average is not None else None)
    whole += [bits(optimizer.state_dict()) for optimizer in trainer.optimizers]
    if os.environ.get("SHOW"):
        print("whole", whole, flush=True)
    return hashlib.sha256(str(whole).encode()).hexdigest()[:12]


class Watch(pl.Callback):
    """Prints where this replica stands, once its state is what everybody's is."""

    came = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.came and trainer.global_step:
            print("back", trainer.global_step, flush=True)
        self.came = True
        if batch_idx % trainer.accumulate_grad_batches:
            return  # in a window BatchNorm counts what this replica sees
        place = f"{trainer.current_epoch}:{batch_idx}:{trainer.global_step}"
        print("at", place, trainer.strategy.manager.num_participants(), digest(trainer, module), flush=True)


def main() -> None:
    """Train to the end."""
    torch.set_num_threads(1)
    torch.manual_seed(GROUP)
    what = os.environ["WHAT"]
    data = TensorDataset(torch.arange(3.0 * 4 * BATCHES * 2).view(-1, 3) % 17 / 17)
    trainer = pl.Trainer(
        strategy="fault_tolerant", accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False,
        enable_checkpointing=what == "stopping", enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks(what), Watch()], num_sanity_val_steps=1,
    )  # fmt: skip
    model = Model(norm=what not in ("pruning", "swa from the start"))
    trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 16))
    print("done", trainer.global_step, digest(trainer, model), flush=True)


if __name__ == "__main__":
    main()
