"""`TrainingLoop` with a group of devices: two trainings, checkpoints, the end; no CPU memory travels over it."""

from __future__ import annotations

import pathlib

import pytest

from tests import device_only
from tests.launch.job import job

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_two_trainings_send_no_cpu_memory_over_it(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    given = {"DEVICE_ONLY": str(ROOT / "tests/loop/runs_job.py"), "FOLDER": str(tmp_path), "FATAL": "9:9"}
    for name, value in {**given, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    with job(ROOT / "tests/device_only.py", "--replicas", "2") as running:
        assert running.run() == 0, running.text
    device_only.check(running.text, 2)
