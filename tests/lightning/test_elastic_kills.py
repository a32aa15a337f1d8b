"""Elastic data under the Trainer in real processes, killed one after the other: each sample is committed once."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from collections import defaultdict

import pytest

from tests.launch.job import Job, job
from tests.lightning.test_positions import ONCE

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/lightning/elastic_job.py"
LENGTH, EPOCHS = 700, 3


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Make it, and steps are slow no more."""
    settings = {
        "LENGTH": LENGTH, "EPOCHS": EPOCHS, "BATCH": 4, "GLOBAL": 21, "HURRY": tmp_path / "hurry", "FOLDER": tmp_path,
        "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT,
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "hurry"


def pid_of(running: Job, name: str) -> int:
    return next(g for g in running.supervisor._groups.values() if g.name == name).agent.pids()[0]


def test_every_sample_is_committed_once_through_kills(hurry: pathlib.Path) -> None:
    """Each is killed once it trains with the two others; the one killed before is back by then."""
    kills: list[str] = []

    def kill(_: re.Match[str]) -> None:
        name = f"replica-{len(kills)}"
        kills.append(name)
        os.kill(pid_of(running, name), signal.SIGKILL)
        if len(kills) < 3:
            running.when(rf"{name}/0\] commit \d \d+ 3", kill, after=[rf"\[{name}\] started"])
        else:
            hurry.touch()

    with job(SCRIPT, "--replicas", "3", "--timeout", "20") as running:
        running.when(r"replica-0/0\] commit \d \d+ 3", kill, after=[r"replica-0/0\] commit 0 [5-9] "])
        assert running.run() == 0, running.text
    assert len(kills) == 3, running.text
    ends = re.findall(r"\] done (.*)", running.text)
    assert len(ends) >= 2, running.text  # who was killed last may be back too late
    assert len(set(ends)) == 1, ends
    assert ends[0].endswith("faults 0"), ends


def test_survivors_inside_a_batch_and_between_two(hurry: pathlib.Path) -> None:
    """One passes over batches until it is where the other is; then both train on the step that was vetoed."""
    with job(ROOT / "tests/lightning/elastic_positions_job.py", "--replicas", "3", "--timeout", "20", *ONCE) as running:
        assert running.run() == 0, running.text
    steps: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for epoch, batch, step in re.findall(r"\] made (\d) (\d+) (\d+)", running.text):
        steps[step].add((epoch, batch))
    assert len(steps) == EPOCHS * 6, running.text
    assert [found for found in steps.values() if len(found) > 1] == [], running.text
    assert re.findall(r"replica-1/0\] veto (.*)", running.text)[:1] == ["1 5"], running.text  # it passed over that one
    ends = re.findall(r"\] counted (.*)", running.text)
    assert len(ends) == 2, running.text
    assert set(ends) == {f"0 {EPOCHS * 6}"}, running.text
