"""FaultTolerantTrainer over a tiny GPT-2 that each replica group shards with FSDP2, for tests; no downloads.

Lines: `begin STEP GROUP RANK DIGEST`, `step STEP GROUP RANK MEMBERS DIGEST` after each step (of this process's shards
of parameters and optimizer state); `done GROUP RANK STEP DIGEST`.

    fsdp2_trainer.py FOLDER STEPS [--resume]

A group that was left alone waits in each step until the other one comes back: it does not end without it.
"""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ft_accelerate import FaultTolerantTrainer
from tests.accelerate.fsdp2_script import digest, say
from tests.accelerate.trainer_job import JOIN_S, WORDS, Text, comes, hold

GROUP = int(os.environ.get("FT_REPLICA_GROUP", "0"))


def tiny_model() -> GPT2LMHeadModel:
    """Randomly initialised; input and output embeddings are one parameter."""
    config = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


class Probe(TrainerCallback):
    """Says what the shards are after each step, and waits for the other group."""

    trainer: Any = None
    met = False
    """There were two groups."""

    def shards(self) -> str:
        return digest(self.trainer.model.state_dict(), self.trainer.optimizer.state_dict())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say("begin", state.global_step, GROUP, args.process_index, self.shards())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        members = len(self.trainer.accelerator.manager.members)
        say("step", state.global_step, GROUP, args.process_index, members, self.shards())
        self.met = self.met or members == 2
        if self.met and members == 1:
            hold(lambda: comes(f"replica-{1 - GROUP}"))
            threading.Event().wait(JOIN_S)  # it fetches state between our steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--resume", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    arguments = TrainingArguments(
        output_dir=str(a.folder / "out"), max_steps=a.steps, per_device_train_batch_size=2, logging_steps=3,
        gradient_accumulation_steps=2, learning_rate=1e-2, warmup_steps=2, save_strategy="steps", save_steps=3,
        eval_strategy="steps", eval_steps=3, use_cpu=True, report_to=[], seed=5, disable_tqdm=True, max_grad_norm=0.5,
        save_total_limit=2, dataloader_pin_memory=False, fsdp="full_shard auto_wrap",
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )  # fmt: skip
    probe = Probe()
    trainer = FaultTolerantTrainer(
        tiny_model(), arguments, train_dataset=Text(64), eval_dataset=Text(10), callbacks=[probe]
    )
    probe.trainer = trainer
    trainer.train(resume_from_checkpoint=True if a.resume else None)
    trainer.save_model(str(a.folder / "final"))
    say("done", GROUP, arguments.process_index, trainer.state.global_step, probe.shards())


if __name__ == "__main__":
    main()
