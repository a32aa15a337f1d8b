"""Progress in a log file: rich would draw its bar once, at the end; a former leader prints no last word."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from ft_lightning._compat import writers

TREE = "lightning.pytorch"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class OwnBar(RichProgressBar):
    """A user's."""


def trainer(bar: Any) -> Any:
    return Trainer(callbacks=[bar], logger=False, enable_checkpointing=False, accelerator="cpu", barebones=False)


@pytest.mark.parametrize(
    ("bar", "out", "kind"),
    [
        (RichProgressBar, io.StringIO, TQDMProgressBar),
        (RichProgressBar, Terminal, RichProgressBar),
        (OwnBar, io.StringIO, OwnBar),
        (TQDMProgressBar, io.StringIO, TQDMProgressBar),
    ],
)
def test_where_there_is_no_terminal_tqdm_writes_lines(
    monkeypatch: pytest.MonkeyPatch, bar: Any, out: Any, kind: type
) -> None:
    made = trainer(bar(refresh_rate=7))
    made.progress_bar_callback.disable()
    monkeypatch.setattr(sys, "stdout", out())
    writers.progress_for_logs(TREE, made)
    shown: Any = made.progress_bar_callback
    assert [type(shown)] == [kind]
    assert shown.is_disabled
    assert shown.refresh_rate == 7
    assert sum("ProgressBar" in type(one).__name__ or isinstance(one, OwnBar) for one in made.callbacks) == 1


def test_a_former_leader_prints_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    made = trainer(TQDMProgressBar())
    bar = made.progress_bar_callback
    bar._trainer = made
    bar.train_progress_bar = bar.init_train_tqdm()
    made.training = True
    before = said.getvalue()
    writers.progress_bar(made, shown=False)
    assert said.getvalue() == before
    assert bar.is_disabled
