"""A training script whose replica groups shard the model with FSDP2, for tests.

Lines: `commit STEP GROUP RANK MEMBERS DIGEST` after each committed step (of this process's shards of parameters and
optimizer state, and of buffers); `done GROUP RANK STEP DIGEST WHOLE` at the end, WHOLE is of the full state dict.

Options in the environment: STEPS (committed, after which training ends), or END_FILE, a file that will hold that
number; PLUGIN=0: FSDP is said by the launcher's variables; ACCUMULATE, PRECISION, STATE (`state_dict_type`),
EFFICIENT=1 (`cpu_ram_efficient_loading`), OFFLOAD=1 (`cpu_offload`), SHARD (`dp_shard_size`),
OVERFLOW=1 (fp16: one process's gradients overflow in the third step; `scale STEP GROUP RANK SCALE SKIPPED` after each).
With SAVE the state is saved there every SAVE_EVERY steps, in SAVE/step_N, and the model at the end, in SAVE/final; with
RESUME state is loaded from there first (`loaded GROUP RANK STEP DIGEST`).
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
import torch  # noqa: E402
from accelerate import DataLoaderConfiguration  # noqa: E402
from accelerate.utils import (  # noqa: E402
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    set_seed,
)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from ft_accelerate import FaultTolerantAccelerator as Accelerator  # noqa: E402

GROUP = int(os.environ.get("FT_REPLICA_GROUP", "0"))
END = os.environ.get("END_FILE")
STEPS = int(os.environ.get("STEPS", "100000"))
ACCUMULATE = int(os.environ.get("ACCUMULATE", "2"))
PRECISION = os.environ.get("PRECISION", "no")
PACE_S = float(os.environ.get("PACE_S", "0"))
SAVE, RESUME = os.environ.get("SAVE"), os.environ.get("RESUME")
EFFICIENT = os.environ.get("EFFICIENT") == "1"
OVERFLOW = os.environ.get("OVERFLOW") == "1"
SAVE_EVERY = 4
SAMPLES = 160
pause = threading.Event()


class Block(nn.Module):
    """Its inner width is odd, so that shards are padded; with BatchNorm, so that there are buffers, if that can be.

    Accelerate's `cpu_ram_efficient_loading` cannot load a buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(8, 17), nn.Linear(17, 8)
        self.norm = nn.LayerNorm(17) if EFFICIENT else nn.BatchNorm1d(17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.back(torch.tanh(self.norm(self.wide(x))))
        return out


class Net(nn.Module):
    """Two blocks, each sharded by itself, and the root's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.blocks(self.first(x)))
        return out


def say(*words: object) -> None:
    """In one piece: the processes of a group write to one pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def digest(*states: Any) -> str:
    """Of all tensors, of sharded ones what this process holds."""
    found = hashlib.sha256()
    for value in states:
        for _, leaf in sorted(torch.utils._pytree.tree_leaves_with_path(value), key=lambda leaf: str(leaf[0])):
            if isinstance(leaf, torch.Tensor):
                found.update(getattr(leaf, "_local_tensor", leaf).detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def plugin() -> FullyShardedDataParallelPlugin | None:
    """As a script writes it."""
    if os.environ.get("PLUGIN") == "0":
        return None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
        state_dict_type=os.environ.get("STATE", "SHARDED_STATE_DICT"),
        cpu_ram_efficient_loading=EFFICIENT, cpu_offload=os.environ.get("OFFLOAD") == "1",
    )  # fmt: skip


def accelerator_of() -> Any:
    """As the environment says."""
    shard = os.environ.get("SHARD")
    return Accelerator(
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)] if OVERFLOW else None,
        parallelism_config=None if shard is None else ParallelismConfig(dp_shard_size=int(shard)),
        gradient_accumulation_steps=ACCUMULATE, mixed_precision=PRECISION, fsdp_plugin=plugin(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip


class Blows:
    """Once, on one process."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.left = accelerator, OVERFLOW and GROUP == accelerator.process_index == 1

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, too large for fp16 when it is time."""
        if not self.left or self.accelerator.committed_steps != 2:
            return loss
        self.left = False
        return loss * 1e30

    def tell(self) -> None:
        """Print what became of the step."""
        it = self.accelerator
        scale, skipped = it.scaler.get_scale(), it.optimizer_step_was_skipped
        say("scale", it.committed_steps, GROUP, it.process_index, scale, skipped)


def over(step: int) -> bool:
    """This was the last step."""
    last = int(pathlib.Path(END).read_text()) if END is not None and pathlib.Path(END).exists() else STEPS
    return step >= last


def main() -> None:
    """Train until told."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("ft_core", "ft_accelerate"):
        logging.getLogger(name).setLevel(logging.INFO)
    set_seed(7)
    numbers = torch.arange(SAMPLES)
    x = torch.stack([numbers % 7, numbers % 11, numbers % 13], 1) / 10
    loader = DataLoader(TensorDataset(numbers, x), 4, shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    accelerator = accelerator_of()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert accelerator.is_fsdp2
    rank = accelerator.process_index
    say("pid", GROUP, rank, os.getpid())
    if RESUME:
        accelerator.load_state(RESUME)
        say(
            "loaded",
            GROUP,
            rank,
            accelerator.manager.current_step(),
            digest(model.state_dict(), optimizer.state_dict()),
        )
    model.train()
    blows = Blows(accelerator)
    for _ in accelerator.epochs(10**6):
        if over(accelerator.committed_steps):
            break
        for _, inputs in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs).float(), inputs.sum(1, keepdim=True))
                accelerator.backward(blows(loss))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            pause.wait(PACE_S)
            if OVERFLOW and accelerator.sync_gradients:
                blows.tell()
            if not accelerator.sync_gradients or accelerator.optimizer_step_was_skipped:
                continue
            step = accelerator.committed_steps
            members = len(accelerator.manager.members)
            say("commit", step, GROUP, rank, members, digest(model.state_dict(), optimizer.state_dict()))
            if SAVE and step % SAVE_EVERY == 0:
                accelerator.save_state(f"{SAVE}/step_{step}")
            if over(step):
                break
    whole = accelerator.get_state_dict(model)
    if SAVE:
        accelerator.save_model(model, f"{SAVE}/final")
    steps = accelerator.committed_steps
    say("done", GROUP, rank, steps, digest(model.state_dict(), optimizer.state_dict()), digest(whole))
    accelerator.end_training()


if __name__ == "__main__":
    main()
