"""A tiny language model with transformers.Trainer, trained by replica groups that may die at any time.

    ft-accelerate launch --config_file examples/accelerate/ft.yaml examples/accelerate/train_transformers.py
    ftrun --replicas 2 examples/accelerate/train_transformers.py      the same, with ftrun's options
    python examples/accelerate/train_transformers.py                  plain Trainer: the class adds nothing then

What makes it fault tolerant, and the whole difference to a script of transformers' own:

    -from transformers import Trainer
    +from ft_accelerate import FaultTolerantTrainer as Trainer

Kill any of the processes with `kill -9`: the others keep training, it is started again and goes on in the middle of the
epoch. Checkpoints are Trainer's own: `--resume` finds them, and so does a plain Trainer. At the end all print the same
digest.

The text is Python's own standard library, byte by byte; the model a GPT-2 with two layers and random weights.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import pathlib
import sysconfig

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

from ft_accelerate import FaultTolerantTrainer as Trainer

MODULES = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "logging/__init__.py", "pathlib.py",
           "statistics.py", "subprocess.py", "tarfile.py", "typing.py")  # fmt: skip
"""Of the standard library. Where one of them is a package it is left out."""
LENGTH = 64
"""Bytes of a sample."""


def tokenize(text: str) -> torch.Tensor:
    """One token per byte of UTF-8."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


class Text(Dataset[dict[str, torch.Tensor]]):
    """A text cut into samples of equal length.

    Args:
        tokens: of the whole text, one dimension.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self.samples = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def get_datasets() -> tuple[Text, Text]:
    """Training text, and the last twentieth of it for evaluation."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    tokens = tokenize("".join((library / name).read_text() for name in MODULES if (library / name).is_file()))
    cut = len(tokens) * 19 // 20
    return Text(tokens[:cut]), Text(tokens[cut:])


def get_model(width: int) -> GPT2LMHeadModel:
    """Random weights."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", default="gpt", help="for checkpoints")
    parser.add_argument("--save_steps", type=int, default=250, help="evaluate and save every so many steps")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, also where there is a GPU")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("ft_accelerate").setLevel(logging.INFO)
    logging.getLogger("ft_core").setLevel(logging.INFO)
    torch.set_num_threads(1)
    set_seed(args.seed)
    train, held_out = get_datasets()
    trainer = Trainer(
        get_model(args.width),
        TrainingArguments(
            output_dir=args.dir,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=64,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=args.lr,
            lr_scheduler_type="linear",
            warmup_steps=20,
            logging_steps=50,
            eval_strategy="steps",
            eval_steps=args.save_steps,
            save_steps=args.save_steps,
            save_total_limit=2,
            seed=args.seed,
            report_to=[],
            disable_tqdm=True,
            use_cpu=args.cpu,
            dataloader_pin_memory=torch.accelerator.is_available(),
        ),
        train_dataset=train,
        eval_dataset=held_out,
    )
    newest = get_last_checkpoint(args.dir) if args.resume and os.path.isdir(args.dir) else None
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(os.path.join(args.dir, "final"))
    state = trainer.model.state_dict().values()
    digest = hashlib.sha256(b"".join(value.cpu().contiguous().numpy().tobytes() for value in state)).hexdigest()[:16]
    print(f"done: pid {os.getpid()}, step {trainer.state.global_step}, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
