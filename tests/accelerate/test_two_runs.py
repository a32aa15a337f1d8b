"""Two trainings with one Accelerator: who is killed in the second one joins the others there."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.launch.job import job

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_a_kill_in_the_second_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes over the first, which is finished, and has the others' model at the end of the second."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with job(ROOT / "tests/accelerate/two_runs_job.py", "--replicas", "2", "--max-restarts", "2") as running:
        assert running.run() == 0, running.text
    assert running.count("this training run is passed over, as the others are in a later one") == 1, running.text
    first, second = (re.findall(rf"\] run {run}: (\d+) (\w+)", running.text) for run in range(2))
    assert [end for end in first if end[0] != "0"] == [first[0]] * 2, running.text
    assert second == [second[0]] * 2, running.text
    planned = 12 * 96 // 4 // 2
    assert planned - 1 <= int(second[0][0]) <= planned, "a plain script does not repeat the batch of a vetoed step"
