"""The program of test_fabric_kit.py: Fabric loops of several kinds, each with a digest of the model at its end.

Lines: `step N MEMBERS PID` after each commit, `veto N`, `stopped N`, `saving N PID`, `done N DIGEST`.

MODE says which loop: "turns" (two models, trained in turns), "early" (group 0 ends after STEPS, the others would not),
"saves" (every 5 steps a checkpoint; the process that finds the file FUSE dies while it writes), "runs" (two runs),
"validates" (group 0 validates for VALIDATE_S after step 5, alone), "places" (the loop counts batches by itself).
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import threading
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

STEPS = [int(steps) for steps in os.environ.get("STEPS", "30").split()]
"""Of each run."""
MODE = os.environ["MODE"]
FOLDER = pathlib.Path(os.environ.get("FOLDER", "."))
ENDLESS = 1_000_000


class Progress:
    def __init__(self) -> None:
        self.step = 0
        self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def data(step: int, group: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step * 8 + group))


def digest(*models: Any) -> str:
    found = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def say(*words: object) -> None:
    """In one piece: who is killed leaves no half line behind."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def committed(strategy: Any, progress: Progress) -> bool:
    """After the last optimizer step of a batch."""
    if strategy.step_vetoed:
        say("veto", progress.step)
        return False
    progress.step += 1
    say("step", progress.step, strategy.manager.num_participants(), os.getpid())
    whole = strategy.manager.num_participants() == int(os.environ["FT_NUM_REPLICA_GROUPS"])
    threading.Event().wait(0.02 if whole else 0.1)  # leave the processor to those that start
    return True


def last(strategy: Any, run: int) -> int:
    return STEPS[run] if MODE != "early" or strategy.replica_group == 0 else ENDLESS


def fuse(fabric: Any) -> None:
    """Whoever writes while FUSE is there dies half-way."""
    io = fabric.strategy.checkpoint_io
    save, path = io.save_checkpoint, FOLDER / "fuse"

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        if path.exists():
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    io.save_checkpoint = save_checkpoint


def train(fabric: Any, run: int) -> None:
    strategy = fabric.strategy
    one, other = build(1), build(2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.05) for model in (one, other))
    one, first = fabric.setup(one, first)
    other, second = fabric.setup(other, second)
    progress = Progress()
    strategy.register(f"progress {run}", progress)
    while True:
        place = strategy.open_step(progress.batch if MODE == "places" else None)
        if strategy.stopped:
            say("stopped", progress.step)
            break
        if place is not None:
            progress.batch = place
        if progress.step >= last(strategy, run):
            break
        x = data(progress.batch if MODE == "places" else progress.step, strategy.replica_group)
        progress.batch += 1
        if MODE == "turns":
            first.zero_grad()
            fabric.backward((one(x) - 1).square().mean())
            first.step()
            second.zero_grad()
            fabric.backward(other(x).square().mean())
            second.step()
        else:
            first.zero_grad()
            second.zero_grad()
            fabric.backward((one(x) - other(x) - 1).square().mean())
            first.step()
            second.step()
        if not committed(strategy, progress):
            continue
        if MODE == "saves" and progress.step % 5 == 0:
            say("saving", progress.step, os.getpid())
            fabric.save(FOLDER / f"step_{progress.step}.ckpt", {"step": progress.step, "digest": digest(one, other)})
        if MODE == "validates" and progress.step == 5 and strategy.replica_group == 0:
            with strategy.by_itself("validation"):
                threading.Event().wait(float(os.environ["VALIDATE_S"]))
    say("done", progress.step, digest(one, other), strategy.manager.current_step() if strategy.manager else 0)
    strategy.finish()


def main() -> None:
    fabric = Fabric(strategy="fault_tolerant", accelerator="cpu", devices=1)
    fabric.launch()
    fuse(fabric)
    for run in range(len(STEPS)):
        train(fabric, run)


if __name__ == "__main__":
    main()
