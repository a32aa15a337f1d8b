"""A step that a death finds in its forward pass goes on in the next quorum (R19): nothing is computed again."""

from __future__ import annotations

import csv
import pathlib
import re

import pytest

from tests.launch.job import job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/lightning/moving_job.py"
BATCHES = 36


@pytest.mark.parametrize(
    ("victim", "accumulate"),
    [(0, 1), pytest.param(2, 1, marks=pytest.mark.long), (0, 2)],
    ids=["leader", "other", "accumulating"],
)
def test_nothing_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, victim: int, accumulate: int
) -> None:
    """Each step is committed, logged by who leads then, and saved: also the one in which the leader died."""
    settings = {
        "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VICTIM": str(victim),
        "ACCUMULATE": str(accumulate),
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with job(SCRIPT, "--replicas", "3", "--max-restarts", "0", "--timeout", "20") as running:
        running.run()
    text, steps = running.text, BATCHES // accumulate
    survivors = [group for group in range(3) if group != victim]
    assert sorted(re.findall(r"replica-(\d)/0\] moved", text)) == [str(group) for group in survivors], text
    ends = {int(group): end.split() for group, end in re.findall(r"replica-(\d)/0\] done (.*)", text)}
    assert sorted(ends) == survivors, text
    assert len({end[0] for end in ends.values()}) == 1, ends
    assert [end[1:3] for end in ends.values()] == [[str(steps), "0"]] * 2, text
    assert [ends[group][3] for group in survivors] == ["True", "False"], text
    with (tmp_path / "run/version_0/metrics.csv").open() as file:
        logged = [int(row["step"]) for row in csv.DictReader(file)]
    assert logged == list(range(steps)), text
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"epoch={n}.ckpt" for n in range(3)], text
