"""The example scripts as a user runs them: in two replica groups, the leading one of which is killed; and in none."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import runpy
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from accelerate.state import AcceleratorState

from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.timeout(180), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES, PACED = ROOT / "examples/accelerate", ROOT / "tests/accelerate/paced.py"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working tree can be imported; no state of an Accelerator and no level of a logger is left behind."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    levels = {name: logging.getLogger(name).level for name in ("accelerate", "ft_accelerate", "ft_core")}
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def run_with_kill(command: str, at: str, away: pathlib.Path) -> Job:
    """Run an example to its end; group 0 is killed at the first line that matches `at`, and must come back."""
    with job(f"{PACED} {away} {EXAMPLES}/{command}", "--replicas", "2") as running:

        def kill(_: re.Match[str]) -> None:
            away.touch()
            pids = re.findall(r"\[replica-0\] started \(pid (\d+)\)", running.text)
            os.kill(int(pids[-1]), signal.SIGKILL)

        running.when(at, kill)
        running.when(r"^\[replica-0/0\] .* healed to step [1-9]", lambda _: away.unlink())
        assert running.run() == 0, running.text
        assert running.count(r"\[replica-0\] rank 0 .* was ended by SIGKILL; starting again") == 1, running.text
        digests = re.findall(r"^\[replica-(\d)/0\] done: .* digest (\w{16})$", running.text, re.MULTILINE)
        assert [group for group, _ in sorted(digests)] == ["0", "1"], running.text
        assert len({digest for _, digest in digests}) == 1, running.text
        assert not away.exists(), running.text
        return running


def run_plain(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example in this process, as `python name` does."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="example")["main"]()


def test_plain_script_is_killed_and_its_checkpoint_resumed_without_groups(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "digits"
    options = ["--cpu", "--width=16", "--save_every=2", f"--dir={folder}"]
    done = run_with_kill(f"train.py --epochs=6 {' '.join(options)}", r"\] epoch   2 .* group 0$", tmp_path / "away")
    epochs = [int(number) for number in re.findall(r"^\[replica-\d/0\] epoch +(\d+)", done.text, re.MULTILINE)]
    assert sorted(epochs) == list(range(6)), done.text
    assert sorted(path.name for path in folder.iterdir()) == ["epoch_4", "epoch_6", "model"]
    capsys.readouterr()
    run_plain("train.py", "--epochs=7", "--resume", *options, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert f"resumed from {folder}/epoch_6" in out
    assert re.findall(r"epoch +(\d+)", out) == ["6"], "the epochs before are in the checkpoint"


def test_trainer_is_killed_and_its_checkpoint_resumed_without_groups(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gpt"
    options = ["--cpu", "--width=16", "--batch_size=2", "--save_steps=50", f"--dir={folder}"]
    done = run_with_kill(f"train_transformers.py --steps=100 {' '.join(options)}", r"'loss': ", tmp_path / "away")
    assert done.count(r"done: .* step 100,") == 2, done.text
    assert {path.name for path in folder.iterdir()} == {"checkpoint-50", "checkpoint-100", "final"}
    capsys.readouterr()
    run_plain("train_transformers.py", "--steps=105", "--resume", *options, monkeypatch=monkeypatch)
    assert "step 105, digest" in capsys.readouterr().out
