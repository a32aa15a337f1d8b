"""One of the processes behind test_modes.py: trains every mode it is told to, one after another, and saves the results.

    python modes_worker.py STRATEGY DEVICES FOLDER RANK MODE[=LIGHTHOUSE] ...

STRATEGY is `ddp` or `fault_tolerant`; the environment says which rank or group this is. FOLDER/MODE.STRATEGY.RANK holds
parameters, optimizers, scaler, what each batch left behind, and what was counted.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ft_lightning
from ft_lightning.trainer import leader_files

FAULT = RuntimeError("injected by the test")


def group() -> int:
    return int(os.environ.get("FT_REPLICA_GROUP", "0"))


class Automatic(L.LightningModule):
    """AdamW, BatchNorm, a scheduler per step."""

    interval = "step"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.other = nn.Linear(8, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x) + self.other(x), y)
        self.log("norm", self.other.weight.detach().norm())  # the same on all replicas
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        return [optimizer], [{"scheduler": self.scheduler(optimizer), "interval": self.interval}]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


class Momentum(Automatic):
    interval = "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=5e-2, momentum=0.9)
        return [optimizer], [{"scheduler": self.scheduler(optimizer), "interval": self.interval}]


class Plateau(Automatic):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, patience=1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "norm"}]


class SometimesNone(Automatic):
    """On one replica there is no loss in some batches."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if group() == 1 and batch_idx in (0, 4, 9) else loss


class Manual(Automatic):
    """One optimizer, clipped by hand, stepping every second batch; the scheduler is stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) + self.other(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        last = batch_idx % 2 == 1 or self.trainer.is_last_batch
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch))
        if last:
            self.clip_gradients(optimizer, 0.2, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class TwoOptimizers(Manual):
    """One backward, two optimizers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net.parameters(), lr=1e-2), torch.optim.SGD(self.other.parameters(), lr=1e-1)]


class Alternating(TwoOptimizers):
    """The second optimizer's gradients are reduced in every batch, but it steps in every third."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        with first.toggle_model():
            self.manual_backward(self.loss(batch))
        first.step()
        with second.toggle_model():
            self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()


class Gan(TwoOptimizers):
    """Two losses, toggled by hand."""

    def losses(self, batch: list[Tensor]) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        x, y = batch
        return (
            lambda: nn.functional.cross_entropy(self.net(x), y) + self.other(x).square().mean(),
            lambda: nn.functional.cross_entropy(self.other(x), 2 - y) + self.net(x).square().mean(),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), self.losses(batch), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class GanOfClosures(Gan):
    """Two losses, closures, `toggle_model`."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), self.losses(batch), strict=True):

            def closure(optimizer: Any = optimizer, loss: Callable[[], Tensor] = loss) -> None:
                optimizer.zero_grad()
                self.manual_backward(loss())

            with optimizer.toggle_model():
                optimizer.step(closure=closure)


class Untoggled(Gan):
    """Nothing is toggled; the first optimizer's parameters stay frozen after the last batch of an epoch began."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net[3].requires_grad_(batch_idx % 2 == 0)
        for optimizer, loss in zip(self.optimizers(), self.losses(batch), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()


class Faults(Callback):
    """Group 1 reports an error in some batches: the first vote of each is a veto."""

    def __init__(self, *batches: int) -> None:
        self.batches = batches or (1, 4, 8)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.batches and group() == 1:
            trainer.strategy.manager.report_error(FAULT)


class Breaks(Callback):
    """Group 1 loses its quorum in some batches, at the first backward or (batch 5) the second."""

    batches = (1, 5)
    seen = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen = 0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.seen += 1
        batch_idx = trainer.fit_loop.batch_idx
        if self.seen > 1 or batch_idx in self.batches:
            # So both are in this batch: a break may not reach the other one in the fence of the batch before.
            trainer.strategy.reduce_across_groups(loss)  # asks nobody where the quorum has broken before
        if batch_idx in self.batches and group() == 1 and self.seen == 1 + (batch_idx == 5):
            trainer.strategy.manager.hooks.current_attempt().fail(FAULT)


def average() -> Callback:
    """Lightning has it since 2.6."""
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.8)


def scaler() -> MixedPrecision:
    """Overflows at first, and grows soon."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4))


Options = Callable[[], dict[str, Any]]
MODES: dict[str, tuple[type[Automatic], Options]] = {
    "automatic": (Automatic, dict),
    "epochs": (Momentum, lambda: {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "plateau": (Plateau, dict),
    "accumulate": (Momentum, lambda: {"accumulate_grad_batches": 4, "gradient_clip_val": 0.2}),
    "scheduled": (Automatic, lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]}),
    "bf16": (Automatic, lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    "fp16": (Automatic, lambda: {"plugins": [scaler()], "gradient_clip_val": 0.5}),
    "swa": (Momentum, lambda: {"callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]}),
    "ema": (Automatic, lambda: {"callbacks": [average()]}),
    "manual": (Manual, dict),
    "two": (TwoOptimizers, dict),
    "two-fp16": (TwoOptimizers, lambda: {"plugins": [scaler()]}),
    "alternating": (Alternating, dict),
    "gan": (Gan, dict),
    "gan-closures": (GanOfClosures, dict),
    "untoggled": (Untoggled, dict),
}


def with_faults(mode: str, faults: Callable[[], Callback]) -> tuple[type[Automatic], Options]:
    """The mode with a further callback."""
    kind, options = MODES[mode]

    def more() -> dict[str, Any]:
        given = options()
        return {**given, "callbacks": [*given.get("callbacks", []), faults()]}

    return kind, more


VETOED = ("automatic", "plateau", "fp16", "ema", "manual", "two", "alternating", "gan")
BROKEN = ("automatic", "two", "alternating", "gan", "gan-closures")
FAULTY: dict[str, tuple[type[Automatic], Options]] = {
    **{f"{mode}-vetoed": with_faults(mode, Faults) for mode in VETOED},
    **{f"{mode}-broken": with_faults(mode, Breaks) for mode in BROKEN},
    "accumulate-vetoed": with_faults("accumulate", lambda: Faults(1, 8)),
    "none": (SometimesNone, dict),
    "none-fp16": (SometimesNone, lambda: {"plugins": [scaler()]}),
    "none-accumulate": (SometimesNone, lambda: {"accumulate_grad_batches": 2}),
}


class Watch(Callback):
    """Notes after each batch what is to be equal; in a batch whose only step was vetoed, that nothing changed."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.vetoed = 0
        self._before = ""
        """After the last verdict."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._before = self._digest(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = self._digest(trainer, pl_module)
        strategy, steps = trainer.strategy, trainer.global_step
        if getattr(strategy, "vetoed_steps", 0) > self.vetoed and pl_module.automatic_optimization:
            assert strategy.step_vetoed
            assert now == self._before, "a vetoed step changed something"
        if steps > (self.notes[-1][1] if self.notes else 0):
            self._before = now
        self.vetoed = getattr(strategy, "vetoed_steps", 0)
        # Inside an accumulation window each replica has its own statistics in its buffers.
        now = self._digest(trainer, pl_module, buffers=False)
        self.notes.append((now, steps, [g["lr"] for o in trainer.optimizers for g in o.param_groups]))

    def _digest(self, trainer: Any, module: Any, *, buffers: bool = True) -> str:
        """Of all that a vetoed step must leave alone."""
        found = hashlib.sha256()
        configs = [c for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
        for thing in (
            *(p.detach().numpy().tobytes() for p in module.parameters()),
            *(b.numpy().tobytes() for b in module.buffers() if buffers),
            *(flat(o.state_dict()["state"]) for o in trainer.optimizers),
            *(flat(c.scheduler.state_dict()) for c in configs),
            flat(trainer.precision_plugin.state_dict()),
            str(trainer.global_step).encode(),
        ):
            found.update(thing)
        return found.hexdigest()[:16]


def flat(value: Any) -> bytes:
    """All numbers of a state dict."""
    if isinstance(value, Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + flat(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(flat(item) for item in value)
    return repr(value).encode()


def strategy_of(name: str, module: L.LightningModule) -> Strategy:
    if name == "ddp":
        return DDPStrategy(find_unused_parameters=not module.automatic_optimization)
    return ft_lightning.FaultTolerantStrategy()


def train(mode: str, name: str, devices: int) -> dict[str, Any]:
    """One run of a mode; what is compared."""
    kind, options = (MODES | FAULTY)[mode]
    L.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(160, 8), torch.randint(0, 3, (160,)))
    module, watch = kind(), Watch()
    given = options()
    trainer = L.Trainer(
        strategy=strategy_of(name, module), accelerator="cpu", devices=devices, max_epochs=3 if mode == "swa" else 2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{**given, "callbacks": [*given.get("callbacks", []), watch]},
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 8, shuffle=True))
    strategy: Any = trainer.strategy
    return {
        "model": {key: value.clone() for key, value in module.state_dict().items()},
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs if mode != "swa"],
        "precision": trainer.precision_plugin.state_dict(),
        "global_step": trainer.global_step,
        "notes": watch.notes,
        "committed": getattr(strategy, "committed_steps", None),
        "vetoed": getattr(strategy, "vetoed_steps", None),
    }


def main(name: str, devices: int, folder: pathlib.Path, rank: int, modes: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    leader_files.BROADCAST_EVERY = 1  # after each vote, whatever led to it: all who vote take part
    for number, word in enumerate(modes):
        mode, _, places = word.partition("=")
        lighthouse, _, store = places.partition("#")
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # in the group's store: another start of it
        if lighthouse:
            os.environ["FT_LIGHTHOUSE"] = lighthouse
        if store:
            os.environ |= {"MASTER_PORT": store, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        torch.save(train(mode, name, devices), folder / f"{mode}.{name}.{rank}")
        print(f"{mode} done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
