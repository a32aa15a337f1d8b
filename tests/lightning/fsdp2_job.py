"""A Lightning script for test_fsdp2: a model that FSDP2 shards inside each replica group, in groups of several ranks.

`WAY`:
- `kill`: trains until a file names the last step, of a long epoch; saves every few steps.
- `dies`: the same, and once the rank DIES_AT ("RANK data|index STEP") of the leading group kills itself while that
  step's checkpoint is written, after its own data or after the index of all; goes on from the newest at the end.
- `save`: trains a few steps and saves a folder and a file. `load`: starts from each of them, in groups of any size.
- `resume`: saves in the middle of an epoch and goes on to the end; then a second run starts from that.

Lines: `on GROUP RANK BATCH PARTICIPANTS STEP`, `veto EPOCH BATCH`, `done WHAT GROUP RANK DIGEST STEPS EPOCH`,
`whole WHAT GROUP RANK DIGEST STEPS` (of what all ranks of the group hold).
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import signal
import threading
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from ft_lightning import FaultTolerantFSDP2Strategy  # noqa: E402

BATCH, ACCUMULATE, CLIP = 4, 2, 0.05
SAMPLES, SAVED_AT, STEPS = 192, 4, 9
"""Of way `resume`; steps of the optimizer, of which an epoch has 6."""
MANY = 9600
"""Samples of way `kill`: 300 steps in an epoch."""
GROUP = int(os.environ.get("FT_REPLICA_GROUP", "0"))
FOLDER = pathlib.Path(os.environ.get("FOLDER", "."))
pause = threading.Event()


def say(*words: object) -> None:
    """In one piece: the ranks of a group write to one pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def net() -> nn.Sequential:
    """Uneven shards, and one that is empty on the second rank."""
    return nn.Sequential(nn.Linear(3, 17), nn.Tanh(), nn.Linear(17, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Learns a function of its inputs."""
    return nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))


def samples(count: int = SAMPLES) -> TensorDataset:
    """Numbered, with inputs."""
    numbers = torch.arange(count)
    return TensorDataset(numbers, torch.stack([numbers % 7, numbers % 11, numbers % 13], 1) / 5)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One whose state matters."""
    return torch.optim.AdamW(model.parameters(), 1e-2)


class Model(pl.LightningModule):
    """Shards itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.net = net()
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        del batch_idx
        assert self.net is not None
        loss = loss_of(self.net, batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if self.way == "kill":
            pause.wait(0.02)
            if (FOLDER / "end").exists():
                self.trainer.fit_loop.epoch_loop.max_steps = int((FOLDER / "end").read_text())
            members = strategy.manager.num_participants()
            say("on", GROUP, self.global_rank, batch_idx, members, self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del outputs, batch
        strategy: Any = self.trainer.strategy
        if getattr(strategy, "step_vetoed", False) and (batch_idx + 1) % ACCUMULATE == 0:
            say("veto", self.current_epoch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        del batch_idx
        assert self.net is not None
        self.log("val", loss_of(self.net, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this rank's shards of parameters and optimizer state."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        held = [parameter, *(v for v in optimizer.state[parameter].values() if isinstance(v, Tensor))]
        for tensor in held:
            local = getattr(tensor, "_local_tensor", tensor).detach().contiguous()
            found.update(local.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def trainer_of(strategy: Any, **options: Any) -> pl.Trainer:
    """What all ways have."""
    usual: dict[str, Any] = {
        "accelerator": "cpu", "devices": int(os.environ["LOCAL_WORLD_SIZE"]), "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 1,
        "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **(usual | options))


def die_in_the_middle() -> None:
    """Once, in this run of the whole job, where DIES_AT says."""
    rank, part, step = os.environ["DIES_AT"].split()
    method = {"data": "write_data", "index": "finish"}[part]
    inner = getattr(FileSystemWriter, method)

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = inner(self, *args, **kwargs)
        if os.environ["RANK"] == rank and f"step={step}." in str(self.path) and not (FOLDER / "died").exists():
            if part == "data":
                done.wait()
            (FOLDER / "died").touch()
            say("dies", GROUP, rank, *sorted(file.name for file in pathlib.Path(self.path).iterdir()))
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(FileSystemWriter, method, write)


def ends(what: str, model: Model, trainer: pl.Trainer) -> None:
    """Print how it ended."""
    found = digest(model, trainer.optimizers[0])
    say("done", what, GROUP, trainer.global_rank, found, trainer.global_step, trainer.current_epoch)


def whole(what: str, model: Model, trainer: pl.Trainer) -> None:
    """Print what the group holds together."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *(v for v in trainer.optimizers[0].state[parameter].values())):
            full: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(full.detach().contiguous().numpy().tobytes())
    say("whole", what, GROUP, trainer.global_rank, found.hexdigest()[:12], trainer.global_step)


class Tells(pl.Callback):
    """With what a run starts."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Model)
        whole(self.what, pl_module, trainer)


def save() -> None:
    """In both formats."""
    for kind in ("folder", "file"):
        torch.manual_seed(1)
        strategy: Any = FaultTolerantFSDP2Strategy(timeout=20, save_distributed_checkpoint=kind == "folder")
        trainer, model = trainer_of(strategy, max_steps=SAVED_AT, enable_checkpointing=False), Model("save")
        trainer.fit(model, DataLoader(samples(), BATCH))
        trainer.save_checkpoint(FOLDER / f"{kind}.ckpt")
        whole(kind, model, trainer)


def load() -> None:
    """Both of them, and train on."""
    for kind in ("folder", "file"):
        strategy: Any = FaultTolerantFSDP2Strategy(timeout=20)
        options: Any = {"enable_checkpointing": False, "callbacks": [Tells(kind)]}
        trainer, model = trainer_of(strategy, max_steps=STEPS, **options), Model("load")
        trainer.fit(model, DataLoader(samples(), BATCH), ckpt_path=FOLDER / f"{kind}.ckpt")
        ends(kind, model, trainer)


def kill() -> None:
    """Until told."""
    torch.manual_seed(GROUP)
    saving = pl.pytorch.callbacks.ModelCheckpoint(
        FOLDER, "{step}", every_n_train_steps=3, save_top_k=1, save_last=True, monitor="step", mode="max"
    )
    trainer = trainer_of("fault_tolerant_fsdp2", max_epochs=1, val_check_interval=20, callbacks=[saving])
    model, data = Model("kill"), samples(MANY)
    trainer.fit(model, DataLoader(data, BATCH, shuffle=True), DataLoader(samples(), 24))
    ends("kill", model, trainer)
    if os.environ["WAY"] == "dies":
        trainer = trainer_of(FaultTolerantFSDP2Strategy(timeout=20), max_steps=trainer.global_step, logger=False)
        model = Model("resume")
        trainer.fit(model, DataLoader(data, BATCH, shuffle=True), ckpt_path=FOLDER / "last.ckpt")
        ends("resumed", model, trainer)


def resume() -> None:
    """Two runs, of which the second one starts where the first one saved; the same once more with one file."""
    for folders in (True, False):
        kind, data = "folder" if folders else "file", DataLoader(samples(), BATCH)
        saving = pl.pytorch.callbacks.ModelCheckpoint(
            FOLDER, kind + "-{step}", every_n_train_steps=SAVED_AT, save_top_k=-1, save_on_train_epoch_end=False
        )
        for path in (None, FOLDER / f"{kind}-step={SAVED_AT}.ckpt"):
            torch.manual_seed(1)
            strategy: Any = FaultTolerantFSDP2Strategy(timeout=20, save_distributed_checkpoint=folders)
            callbacks: list[Any] = [saving] if path is None else []
            trainer = trainer_of(strategy, max_steps=STEPS, callbacks=callbacks, enable_checkpointing=path is None)
            model = Model("resume")
            trainer.fit(model, data, ckpt_path=path)
            ends(kind if path is None else f"{kind}-resumed", model, trainer)
            if path is not None and not folders:
                trainer.save_checkpoint(FOLDER / "end.ckpt")
    # What another script would do with the folder.
    tester = trainer_of(FaultTolerantFSDP2Strategy(timeout=20))
    found = tester.validate(Model("resume"), DataLoader(samples(), 48), FOLDER / f"folder-step={SAVED_AT}.ckpt")
    say("validated", GROUP, tester.global_rank, f"{found[0]['val']:.6f}")


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if os.environ["WAY"] == "dies":
        die_in_the_middle()
    ways = {"kill": kill, "dies": kill, "resume": resume, "save": save, "load": load}
    ways[os.environ["WAY"]]()


if __name__ == "__main__":
    main()
