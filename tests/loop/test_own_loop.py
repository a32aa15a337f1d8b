"""The loop of docs/own-loop.md, as its example runs: killed, and with bad input."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import Any

import pytest
import torch
from torch import nn

from ft_core.errors import ConfigError, UsageError
from ft_core.loop import TrainingLoop
from tests.launch.job import job

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/own_loop/train.py"


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_the_example_is_killed_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The leader dies, and one that follows: the same end everywhere, every checkpoint is there, and of its batch."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("BATCHES", "2400")
    with job(EXAMPLE, "--replicas", "3", "--max-restarts", "4") as running:

        def kill(name: str) -> None:
            os.kill(int(re.findall(rf"{name}/0\] pid (\d+)", running.text)[-1]), signal.SIGKILL)

        running.when(r"batch 400: loss", lambda found: kill(leader(running.text, found[0])))
        running.when(r"batch 1000: loss", lambda _: kill("replica-2"))
        assert running.run() == 0, running.text
    ends = re.findall(r"\] done (\d+) (\S+)", running.text)
    assert len(ends) == 3, running.text
    assert set(ends) == {("2400", ends[0][1])}, running.text
    assert running.count(r"SIGKILL") >= 2
    found = {path.name: torch.load(path)["batch"] for path in tmp_path.glob("*.pt")}
    assert found == {f"batch_{n}.pt": n for n in range(200, 2401, 200)}, running.text
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"


def leader(text: str, line: str) -> str:
    """The replica that said this line."""
    found = re.findall(rf"\[(replica-\d)/0\] {re.escape(line)}", text)
    return str(found[-1])


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state\['step'\]=int has no state_dict\(\)"):
        TrainingLoop({"step": 3})  # type: ignore[dict-item]


def test_arguments_that_are_the_loops_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"TrainingLoop\(rank=...\) cannot be given"):
        TrainingLoop({}, rank=3)


@pytest.mark.parametrize("position", [-1, True, 1.5, "3"])
def test_positions(position: Any) -> None:
    with pytest.raises(ConfigError, match="the position must be a whole number, 0 or more"):
        TrainingLoop({}).open(position)


def test_it_is_opened_after_a_model_is_wrapped() -> None:
    with pytest.raises(UsageError, match=r"loop.open\(\) before loop.wrap\(model\)"):
        TrainingLoop({"model": nn.Linear(1, 1)}).open()
