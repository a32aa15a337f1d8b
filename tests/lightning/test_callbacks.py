"""Lightning's own callbacks through a kill: who comes back has their state, and whatever they keep in the model."""

from __future__ import annotations

import pathlib
import re
from collections import defaultdict

import pytest

from tests.launch.job import job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = ("average", "pruning", "finetuning")
LONG = ("ema", "own average", "swa", "swa from the start", "stopping", "accumulation")


@pytest.mark.parametrize("what", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_both_groups_hold_the_same_before_every_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, what: str
) -> None:
    options = {"WHAT": what, "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    with job(ROOT / "tests/lightning/callbacks_job.py", "--replicas", "2", "--timeout", "20") as running:
        assert running.run() == 0, running.text
    assert running.count(r"replica-1/0\] back ") == 1, running.text
    places: dict[str, list[str]] = defaultdict(list)
    for place, digest in re.findall(r"\] at (\S+) 2 (\w+)", running.text):
        places[place].append(digest)
    back = next(place for place, _ in re.findall(r"replica-1/0\] at (\S+) (\d)", running.text.partition("] back ")[2]))
    assert back in places, running.text
    differ = [place for place, found in places.items() if len(set(found)) > 1]
    assert differ == [], running.text
    ends = re.findall(r"\] done (.*)", running.text)
    assert len(ends) == 2, running.text
    assert ends[0] == ends[1], running.text
