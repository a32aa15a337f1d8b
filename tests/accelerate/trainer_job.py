"""A training script with FaultTolerantTrainer for the tests: a tiny random Llama on generated text, no downloads.

    trainer_job.py FOLDER [--steps N] [--plain] [--kill GROUP:STEP] [--veto STEP,STEP] [--resume] ...

Each process writes FOLDER/end-GROUP-RANK.json: digest, global step, learning rates as logged, who writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = 61
WAIT_S = 60.0
"""For another process."""
JOIN_S = 0.2
"""Per step while the other group joins, so that this one does not end without it."""
FREEZE_AT, THAW_AT = 40, 65
"""Steps at which group 0 waits for the test: until it has stopped group 1 (FOLDER/frozen), and lets it go on (no more
FOLDER/alone)."""


class Text(Dataset[dict[str, torch.Tensor]]):
    """Sequences that follow a rule, so that a loss can fall; some positions are padding if `ragged`."""

    def __init__(self, samples: int, ragged: bool = False) -> None:
        self.samples, self.ragged = samples, ragged

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (1 + index % 5) + index) % WORDS
        labels = ids.clone()
        if self.ragged:
            labels[6 + index % 6 :] = -100
        return {"input_ids": ids, "labels": labels}


def tiny_model() -> LlamaForCausalLM:
    """Randomly initialised."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Probe(TrainerCallback):
    """Kills its own process once, keeps in step with the other of two groups, and notes what callbacks are told."""

    def __init__(
        self, folder: Path, kill: str, veto: str, together: bool, late: int, kill_evaluating: str = ""
    ) -> None:
        self.folder, self.together, self.late = folder, together, late
        self.veto_at = [int(step) for step in veto.split(",") if step]
        group, _, step = kill.partition(":")
        self.kill_at = int(step) if group == os.environ.get("FT_REPLICA_GROUP", "none") else -1
        group, _, step = kill_evaluating.partition(":")
        self.kill_evaluating_at = int(step) if group == os.environ.get("FT_REPLICA_GROUP", "none") else -1
        self.evaluated: list[tuple[float, float]] = []
        """Losses of evaluations, as reported and as the same evaluation has them when nobody trains."""
        self.trainer: Any = None
        self.steps: list[int] = []
        self.rates: dict[int, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.veto_at and os.environ["FT_REPLICA_GROUP"] == "0":
            self.veto_at.remove(state.global_step)
            self.trainer.accelerator.manager.report_error(RuntimeError("a step that fails, for the test"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        if self.together:
            report(self.folder, os.environ["FT_REPLICA_GROUP"], state.global_step)
        if 0 <= self.kill_at <= state.global_step:
            self.die_once()
        if self.together and state.global_step >= self.late:
            if self.late and state.global_step == self.late:
                print("now", flush=True)
            self.keep_in_step(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if 0 <= self.kill_evaluating_at <= state.global_step:
            self.die_once()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        trainer = self.trainer
        before, trainer.is_in_train = trainer.is_in_train, False
        try:
            again = trainer.evaluation_loop(trainer.get_eval_dataloader(), "the same, for the test")
        finally:
            trainer.is_in_train = before
        self.evaluated.append((metrics["eval_loss"], again.metrics["eval_loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:  # as scripts do that save an adapter beside the model
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "of_the_script"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "note").write_text(str(state.global_step))

    def die_once(self) -> None:
        """Of SIGKILL, the first time in this run."""
        marker = self.folder / "killed"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def keep_in_step(self, step: int) -> None:
        """Wait for the other group, unless it is to be alone: nothing here may depend on how fast anybody is."""
        other = "1" if os.environ["FT_REPLICA_GROUP"] == "0" else "0"
        alone = self.folder / "alone"
        if other == "1" and step == FREEZE_AT:
            hold((self.folder / "frozen").exists)
        if other == "1" and step == THAW_AT:
            hold(lambda: not alone.exists())

        def near() -> bool:
            return alone.exists() or reported(self.folder, other) >= step - 1

        hold(lambda: near() or comes(f"replica-{other}"))
        deadline = time.monotonic() + JOIN_S
        hold(lambda: near() or time.monotonic() > deadline)  # it fetches state between our steps

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "learning_rate" in logs:
            self.rates[state.global_step] = logs["learning_rate"]


def report(folder: Path, group: str, step: int) -> None:
    """Say how far this group is."""
    partial = folder / f".at-{group}-{os.getpid()}"
    partial.write_text(str(step))
    partial.rename(folder / f"at-{group}")


def reported(folder: Path, group: str) -> int:
    """The last step that a group has said."""
    path = folder / f"at-{group}"
    return int(path.read_text()) if path.exists() else 0


def hold(ready: Callable[[], bool]) -> None:
    """Until it is so."""
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not ready():
        assert time.monotonic() < deadline, "the other group does not come"
        pause.wait(0.01)


def comes(name: str) -> bool:
    """Whether a replica has begun to join."""
    from ft_core.control.lighthouse.client import rooms

    known = rooms(os.environ["FT_LIGHTHOUSE"]) or []
    return any(
        r.life == "up" and not r.member and r.replica_id.startswith(f"{name}:") for room in known for r in room.replicas
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--kill", default="")
    parser.add_argument("--kill-evaluating", default="")
    parser.add_argument("--veto", default="")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--evaluate", type=int, default=0)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--plain", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    trainer_class: Any = Trainer
    if not a.plain:
        from ft_accelerate import FaultTolerantTrainer

        trainer_class = FaultTolerantTrainer
    arguments = TrainingArguments(
        output_dir=str(a.folder / "out"), max_steps=a.steps, num_train_epochs=a.epochs, per_device_train_batch_size=2,
        gradient_accumulation_steps=a.accumulate, learning_rate=1e-2, lr_scheduler_type="linear", warmup_steps=2,
        logging_steps=1, save_strategy="steps" if a.save else "no", save_steps=a.save or 500, use_cpu=True,
        eval_strategy="steps" if a.evaluate else "no", eval_steps=a.evaluate or None, report_to=[], seed=a.seed,
        disable_tqdm=True, max_grad_norm=0.5, data_seed=11, save_total_limit=2, dataloader_pin_memory=False,
        load_best_model_at_end=bool(a.evaluate and a.save), metric_for_best_model="loss" if a.evaluate else None,
    )  # fmt: skip
    probe = Probe(a.folder, a.kill, a.veto, a.together, a.late, a.kill_evaluating)
    trainer = trainer_class(
        tiny_model(), arguments, train_dataset=Text(a.samples, a.ragged), eval_dataset=Text(10), callbacks=[probe]
    )
    probe.trainer = trainer
    trainer.train(resume_from_checkpoint=True if a.resume else None)
    trainer.save_model(str(a.folder / "final"))
    digest = hashlib.sha256()
    for _, value in sorted(trainer.model.state_dict().items()):
        digest.update(value.detach().contiguous().numpy().tobytes())
    name = f"end-{os.environ.get('FT_REPLICA_GROUP', 'plain')}-{os.environ.get('RANK', '0')}.json"
    state = trainer.state
    (a.folder / name).write_text(json.dumps({
        "digest": digest.hexdigest()[:16], "step": state.global_step, "epoch": state.epoch, "max": state.max_steps,
        "steps": probe.steps, "rates": probe.rates, "first": trainer.is_world_process_zero(),
        "evaluated": probe.evaluated,
        "evals": [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry],
        "weights": torch.cat([value.flatten()[:3] for value in trainer.model.state_dict().values()]).tolist(),
        "log": [entry for entry in state.log_history if "loss" in entry], "best": state.best_model_checkpoint,
    }))  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
