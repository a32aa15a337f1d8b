"""`share_evaluation=True` under ftrun with real processes: divided, exact, in order, also if a group is killed in it."""

from __future__ import annotations

import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.accelerate.evaluation_script import BATCH, EPOCHS, SAMPLES
from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/accelerate/evaluation_script.py"
PIECES = -(-SAMPLES // BATCH)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., None]:
    """Sets the script's variables."""

    def settings(**more: str) -> None:
        base = {"FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FT_TIMEOUT_S": "20"}
        for name, value in {**base, "ACCELERATE_FT_SHARE_EVALUATION": "1", **more}.items():
            monkeypatch.setenv(name, value)

    settings()
    return settings


def reports(running: Job) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r"/0\] evaluated (\{.*\})", running.text)]


def check_exact(running: Job, *, ends: int) -> list[dict[str, Any]]:
    """What each group measured is what it would have measured alone, and all end with the same weights."""
    found = reports(running)
    for said in found:
        assert said["digest"] == said["alone"], said
    digests = re.findall(r"/0\] done (\w+)", running.text)
    assert (len(digests), len(set(digests))) == (ends, 1), running.text
    return found


def test_three_groups_evaluate_a_third_each(shared: Callable[..., None]) -> None:
    with job(SCRIPT, "--replicas", "3", "--max-restarts", "0", "--standby", "0") as running:
        assert running.run() == 0, running.text
    found = check_exact(running, ends=3)
    assert sorted((said["number"], said["group"]) for said in found) == [(n, g) for n in range(EPOCHS) for g in range(3)]
    assert all(said["ids"] == list(range(SAMPLES)) for said in found)
    assert {said["bodies"] for said in found} == {-(-PIECES // 3)}


@pytest.mark.parametrize("place", ["0:1:2:0", "1:1:2:1"])
def test_a_group_killed_in_a_shared_evaluation_changes_no_metric(shared: Callable[..., None], place: str) -> None:
    """Before the first or between the two results of its third batch."""
    shared(KILL=place)
    with job(SCRIPT, "--replicas", "3", "--standby", "0") as running:
        assert running.run() == 0, running.text
    assert running.count("was ended by SIGKILL") == 1
    found = check_exact(running, ends=len(re.findall(r"/0\] done", running.text)))
    assert all(said["ids"] == list(range(SAMPLES)) for said in found)
    dead, number, body, _ = (int(n) for n in place.split(":"))
    hit = [said for said in found if said["number"] == number and said["group"] != dead]
    left = len(range(dead, PIECES, 3)) - body
    assert len(hit) == 2
    assert {said["bodies"] for said in hit} <= {-(-PIECES // 3) + left, -(-PIECES // 3) + left - 1}, hit
