"""Survivors of a death go on at the same batch, also if it met one of them inside a batch and another between two."""

from __future__ import annotations

import pathlib
import re
from collections import defaultdict

import pytest

from tests.launch.job import job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/lightning/positions_job.py"
DEATH = (1, 5)
ONCE = ("--max-restarts", "0", "--success", "min")
"""Who comes back when the others have finished waits for ten seconds whether a later run begins."""


@pytest.mark.usefixtures("forged_workers")
@pytest.mark.parametrize("pinned", ["", "1"])
def test_all_steps_are_made_at_the_same_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, pinned: str
) -> None:
    """The step of who was inside goes on, and the other one begins it; or it is lost, and nobody makes it."""
    settings = {"FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PINNED": pinned}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with job(SCRIPT, "--replicas", "3", "--timeout", "20", *ONCE) as running:
        assert running.run() == 0, running.text
    steps: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for epoch, batch, step in re.findall(r"\] step (\d) (\d) (\d+)", running.text):
        steps[int(step)].add((int(epoch), int(batch)))
    assert [found for found in steps.values() if len(found) > 1] == [], running.text
    for group in (0, 1):
        lines = re.findall(rf"replica-{group}/0\] (step|veto|validated) (\d) (\d)", running.text)
        vetoes = {(int(e), int(b)) for what, e, b in lines if what == "veto"}
        assert vetoes == ({DEATH} if pinned else set()), running.text
        assert [(e, b) for what, e, b in lines if what == "validated"] == [(str(e), "5") for e in range(3)]
        assert [(e, b) for what, e, b in lines if what != "validated"] == [
            (str(e), str(b)) for e in range(3) for b in range(6)
        ]
    ends = re.findall(r"\] done (.*)", running.text)
    assert len(ends) == 2, running.text
    assert len(set(ends)) == 1, ends
