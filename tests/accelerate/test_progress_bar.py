"""Trainer's progress bar is the leader's: a new leader goes on with it, and a former one prints no last word."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ProgressCallback

from ft_accelerate._compat.trainer import FollowingHandler


class Job:
    """A training loop's events, with a leader that changes."""

    def __init__(self, *, leads: bool) -> None:
        self.leads = leads
        self.bar = ProgressCallback()
        plain = CallbackHandler([self.bar], None, None, None, None)
        self.handler = FollowingHandler(plain, lambda: self.leads, lambda _: True, lambda: False)
        self.state, self.control = TrainerState(max_steps=10), TrainerControl()
        self.args: Any = SimpleNamespace()

    def event(self, name: str, step: int = 0) -> None:
        self.state.global_step = step
        getattr(self.handler, name)(self.args, self.state, self.control)


@pytest.fixture
def err(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    return written


@pytest.mark.usefixtures("err")
def test_a_new_leader_shows_the_bar_where_training_stands() -> None:
    """It had none, and crashed when it was to move on."""
    job = Job(leads=False)
    job.event("on_train_begin")
    job.event("on_step_end", 1)
    assert job.bar.training_bar is None
    job.leads = True
    job.event("on_step_end", 6)
    assert job.bar.training_bar is not None
    assert job.bar.training_bar.n == 6
    job.event("on_train_end", 10)
    assert job.bar.training_bar is None


def test_a_former_leader_prints_nothing_more(err: io.StringIO) -> None:
    job = Job(leads=True)
    job.event("on_train_begin")
    job.event("on_step_end", 3)
    bar = job.bar.training_bar
    job.leads = False
    job.event("on_step_end", 4)
    said = err.getvalue()
    job.event("on_step_end", 9)
    job.event("on_train_end", 10)
    bar.close()  # as when it is collected
    assert err.getvalue() == said
    assert job.bar.training_bar is None
