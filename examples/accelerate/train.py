"""Handwritten digits with Accelerate, trained by replica groups that may die at any time.

    ft-accelerate launch --config_file examples/accelerate/ft.yaml examples/accelerate/train.py    two replica groups
    ftrun --replicas 2 examples/accelerate/train.py      the same, with ftrun's options
    python examples/accelerate/train.py                  plain Accelerate: the class adds nothing then

What makes it fault tolerant, and the whole difference to a script of Accelerate's own:

    -from accelerate import Accelerator
    +from ft_accelerate import FaultTolerantAccelerator as Accelerator
    ...
    -    for epoch in range(start, args.epochs):
    +    for _ in accelerator.epochs(args.epochs, start):
    +        ... accelerator.epoch ...

The second change lets a group that comes back take over the others' epoch as well as their place in the data. Kill any
of the processes with `kill -9`: the others keep training, it is started again and goes on in the middle of the epoch.
One of them saves and prints; if that one dies, another goes on. At the end all print the same digest.

The data are scikit-learn's: 1797 images of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import pathlib
import shutil
from typing import Any

import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from ft_accelerate import FaultTolerantAccelerator as Accelerator

KEPT = 2
"""Checkpoints, at least 2; older ones are deleted."""


def get_dataloaders(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and evaluation data, from the package, not from the network."""
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div_(16.0)
    data = TensorDataset(images.flatten(1), torch.tensor(digits.target))
    train, held_out = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(held_out, 64)


def get_model(width: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def checkpoints(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """Those in `folder`: (epochs that were complete, path), oldest first."""
    return sorted((int(path.name.removeprefix("epoch_")), path) for path in folder.glob("epoch_*"))


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[Any]) -> float:
    """Accuracy. Each group evaluates all the data, divided among its processes, so all groups know the same."""
    model.eval()
    right = total = 0
    for images, labels in loader:
        with torch.no_grad():
            guesses = model(images).argmax(1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        right += int((guesses == labels).sum())
        total += len(labels)
    return right / total


def training_function(args: argparse.Namespace) -> None:
    """Train, evaluate and save after each epoch."""
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.accumulate
    )
    set_seed(args.seed)
    train_loader, eval_loader = get_dataloaders(args.batch_size)
    model = get_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # A prepared scheduler advances by one for each process of all groups, as it does in one group of that size.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 500))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    start, saved = 0, checkpoints(args.dir)
    if args.resume and saved:
        start, newest = saved[-1]
        accelerator.load_state(str(newest))
        accelerator.print(f"resumed from {newest}")

    accuracy = 0.0
    for _ in accelerator.epochs(args.epochs, start):
        model.train()
        train_loader.set_epoch(accelerator.epoch)
        losses = []
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        # `accelerator.epoch`, not a loop variable: a group that came back during the epoch was moved to it.
        accuracy = evaluate(accelerator, model, eval_loader)
        accelerator.print(
            f"epoch {accelerator.epoch:3d}  loss {float(torch.stack(losses).mean() if losses else 0):.4f}  "
            f"accuracy {accuracy:.4f}  lr {scheduler.get_last_lr()[0]:.6f}  group {accelerator.replica_group}",
            flush=True,
        )
        if args.save_every and (accelerator.epoch + 1) % args.save_every == 0:
            if accelerator.is_main_process:  # before: what is saved now is in its place after the next step
                for _, path in checkpoints(args.dir)[: 1 - KEPT]:
                    shutil.rmtree(path)
            accelerator.save_state(str(args.dir / f"epoch_{accelerator.epoch + 1}"))

    accelerator.save_model(model, str(args.dir / "model"))
    accelerator.end_training()
    state = accelerator.unwrap_model(model).state_dict().values()
    digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in state)).hexdigest()[:16]
    lr = scheduler.get_last_lr()[0]
    print(f"done: pid {os.getpid()}, accuracy {accuracy:.4f}, lr {lr:.6f}, digest {digest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=4, help="batches per optimizer step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path("digits"), help="for checkpoints")
    parser.add_argument("--save_every", type=int, default=10, help="epochs; 0: never")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"), help="default: what the launcher says")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, also where there is a GPU")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("accelerate").setLevel(logging.WARNING)  # a line for every file that is saved
    torch.set_num_threads(1)
    training_function(args)


if __name__ == "__main__":
    main()
