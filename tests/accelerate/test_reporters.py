"""Trainer's reporters (`report_to`) go on with a new leader, which has told them before that another process writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, WandbCallback
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from ft_accelerate._compat.trainer import FollowingHandler

if TYPE_CHECKING:
    from pathlib import Path


class Wandb(WandbCallback):
    """As transformers' own does it, with a list for the service."""

    def __init__(self) -> None:
        self._initialized = False
        self.runs: list[list[int]] = []

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Begin a run where this process writes."""
        self._initialized = True
        if state.is_world_process_zero:
            self.runs.append([])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Once."""
        if not self._initialized:
            self.setup(args, state, model)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        """Needs a run."""
        if not self._initialized:
            self.setup(args, state, model)
        if state.is_world_process_zero:
            self.runs[-1].append(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Nothing."""


class Counter(TrainerCallback):
    """A script's own callback, which training begins for once."""

    begun = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1


class Job:
    """A training loop's events, with a leader that changes."""

    def __init__(self, folder: Path, *callbacks: TrainerCallback) -> None:
        self.leads = False
        self.args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
        plain = CallbackHandler(list(callbacks), None, None, None, None)
        self.handler = FollowingHandler(plain, lambda: self.leads, lambda _: True, lambda: False)
        self.state, self.control = TrainerState(max_steps=10), TrainerControl()

    def event(self, name: str, step: int = 0, **words: Any) -> None:
        """As Trainer has it."""
        self.state.global_step = step
        getattr(self.handler, name)(self.args, self.state, self.control, **words)

    def log(self, step: int) -> None:
        """Something is logged."""
        self.event("on_log", step, logs={"loss": 1.0})


def test_a_new_leader_writes_where_the_former_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    here, out = tmp_path / "here", tmp_path / "out"
    here.mkdir()
    monkeypatch.chdir(here)
    job = Job(out, TensorBoardCallback())
    job.event("on_train_begin")
    job.log(1)
    assert not out.exists()
    job.leads = True
    job.log(2)
    job.event("on_train_end", 3)
    assert len(list(out.glob("runs/*/events*"))) == 1
    assert not list(here.iterdir())  # TensorBoard's default, for those who name no folder


def test_a_service_is_opened_by_who_leads_and_once(tmp_path: Path) -> None:
    wandb, counter = Wandb(), Counter()
    job = Job(tmp_path, wandb, counter)
    job.event("on_train_begin")
    job.log(1)
    job.leads = True
    job.log(2)
    job.leads = False  # frozen; another one led
    job.log(3)
    job.leads = True
    job.log(4)
    job.event("on_train_end", 5)
    job.event("on_train_begin", 0)
    job.log(6)
    assert wandb.runs == [[2, 4, 6]]
    assert counter.begun == 2


def test_who_leads_from_the_beginning_opens_it_once(tmp_path: Path) -> None:
    wandb = Wandb()
    job = Job(tmp_path, wandb)
    job.leads = True
    job.event("on_train_begin")
    job.log(1)
    assert wandb.runs == [[1]]
