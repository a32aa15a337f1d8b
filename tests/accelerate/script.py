"""A training script in the style of Accelerate's examples, for tests: with FT=1 the import is ours, else Accelerate's.

Lines: `on GROUP EPOCH BATCH MEMBERS SHARDS SAMPLES` for each batch; `done DIGEST COMMITS LR EPOCHS` at the end.
Options in the environment: see below. With END_FILE training ends in the epoch whose number that file holds. With SAVE
state is saved there every SAVE_EVERY commits, with a line `saved GROUP NUMBER DIGEST`; the group that is to write
number FUSE kills itself half-way. With EVALUATE a loader for that is prepared after each epoch.
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
import torch  # noqa: E402
from accelerate import DataLoaderConfiguration  # noqa: E402
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

FT = os.environ.get("FT", "1") == "1"
if FT:
    from ft_accelerate import FaultTolerantAccelerator as Accelerator
else:
    from accelerate import Accelerator  # type: ignore[no-redef]

GROUP = int(os.environ.get("FT_REPLICA_GROUP", "0"))
OUT = os.environ.get("OUT")
END = os.environ.get("END_FILE")
EPOCHS = int(os.environ.get("EPOCHS", "3"))
ACCUMULATE = int(os.environ.get("ACCUMULATE", "2"))
CLIP = os.environ.get("CLIP", "norm")
PRECISION = os.environ.get("PRECISION", "no")
PACE_S = float(os.environ.get("PACE_S", "0"))
SAMPLES = int(os.environ.get("SAMPLES", "200"))
SAVE = os.environ.get("SAVE")
SAVE_EVERY = 8
FUSE = int(os.environ.get("FUSE", "-1"))
EVALUATE = os.environ.get("EVALUATE") == "1"
pause = threading.Event()


class Net(nn.Module):
    """With BatchNorm, so that there are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


class Fuse:
    """State that is saved late: after the models, optimizers, schedulers and loaders."""

    lit = False

    def state_dict(self) -> dict[str, Any]:
        if self.lit:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


def say(*words: object) -> None:
    """In one piece: who is killed leaves no half line behind."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def digest(model: nn.Module) -> str:
    """Of all parameters and buffers."""
    parts = [t.detach().contiguous().cpu().numpy().tobytes() for t in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def save(accelerator: Any, model: nn.Module, fuse: Fuse) -> None:
    """Every so many commits."""
    if accelerator.committed_steps % SAVE_EVERY == 0:
        number = accelerator.save_iteration
        # Of the first leader only: the next one may have missed the commit of this save, and make it again alone.
        fuse.lit = number == FUSE and accelerator.is_main_process and GROUP == 0
        accelerator.save_state()
        say("saved", GROUP, number, digest(accelerator.unwrap_model(model)))


def main() -> None:
    """Train until told."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    set_seed(7)
    numbers = torch.arange(SAMPLES)
    x = torch.stack([numbers % 7, numbers % 11, numbers % 13], 1) / 10
    loader = DataLoader(TensorDataset(numbers, x), 4, shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        mixed_precision=PRECISION,
        project_config=ProjectConfiguration(SAVE, automatic_checkpoint_naming=SAVE is not None),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=os.environ.get("BUFFERS", "1") == "1")],
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    fuse = Fuse()
    accelerator.register_for_checkpointing(fuse)
    number = 10**6 if END else EPOCHS
    commits, ft = 0, accelerator if FT else None
    for epoch in ft.epochs(number) if ft is not None else range(number):
        if END and pathlib.Path(END).exists() and epoch > int(pathlib.Path(END).read_text()):
            break
        model.train()
        for batch, (ids, inputs) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
                accelerator.backward(loss)
                if accelerator.sync_gradients and CLIP == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                elif accelerator.sync_gradients and CLIP == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                commits += accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped
            if ft is not None and SAVE and accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                save(ft, model, fuse)
            if ft is not None and ft.manager is not None:
                place: Any = loader.position
                where = f"{place.epoch} {place.batch - 1} {len(ft.manager.members)} {ft.num_replica_groups}"
            else:
                where = f"{epoch} {batch} 1 {accelerator.num_processes}"
            say("on", GROUP, where, *ids.tolist())
            pause.wait(PACE_S)
        if EVALUATE:
            model.eval()
            rest = accelerator.prepare(DataLoader(TensorDataset(numbers, x), 50))
            with torch.no_grad():
                assert sum(len(model(inputs)) for _, inputs in rest) * accelerator.num_processes == SAMPLES
    if OUT and accelerator.process_index == 0:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{OUT}.{GROUP}")
    steps = ft.committed_steps if ft is not None else commits
    say("done", digest(accelerator.unwrap_model(model)), steps, f"{scheduler.get_last_lr()[0]:.9g}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
