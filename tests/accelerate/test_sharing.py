"""`share_evaluation=True` under ftrun with real processes: divided, exact, in order, also if a group is killed."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
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


@pytest.mark.parametrize("elastic", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_three_groups_evaluate_a_third_each(shared: Callable[..., None], elastic: str) -> None:
    shared(ACCELERATE_FT_ELASTIC_DATA=elastic)
    with job(SCRIPT, "--replicas", "3", "--max-restarts", "0", "--standby", "0") as running:
        assert running.run() == 0, running.text
    found = check_exact(running, ends=3)
    assert sorted((said["number"], said["group"]) for said in found) == [
        (n, g) for n in range(EPOCHS) for g in range(3)
    ]
    assert all(said["ids"] == list(range(SAMPLES)) for said in found)
    assert {said["bodies"] for said in found} == {-(-PIECES // 3)}


def test_data_that_is_read_otherwise(shared: Callable[..., None]) -> None:
    """What nothing is gathered of is of one group's part, with a warning; two loops at once are refused."""
    shared(OTHERWISE="1")
    with job(SCRIPT, "--replicas", "3", "--max-restarts", "0", "--standby", "0") as running:
        assert running.run() == 0, running.text
    check_exact(running, ends=3)
    assert running.count(r"a loop over evaluation data gathered nothing: .* Call gather_for_metrics") == 3
    assert running.count(r"refused share_evaluation=True, and a second evaluation loader is read") == 3
    every_other = [n for n in range(SAMPLES) if n // (3 * BATCH) % 2]
    assert re.findall(r"\] some (.*)", running.text) == [str(every_other)] * 3


@pytest.mark.parametrize("place", [pytest.param("0:1:2:0", marks=pytest.mark.long), "1:1:2:1"])
def test_a_group_killed_in_a_shared_evaluation_changes_no_metric(shared: Callable[..., None], place: str) -> None:
    """Before the first or between the two results of its third batch."""
    shared(KILL=place)
    with job(SCRIPT, "--replicas", "3", "--max-restarts", "0", "--success", "min") as running:
        assert running.run() == 0, running.text
    assert len(set(re.findall(r"\(pid (\d+)\) was ended by SIGKILL", running.text))) == 1
    found = check_exact(running, ends=len(re.findall(r"/0\] done", running.text)))
    assert all(said["ids"] == list(range(SAMPLES)) for said in found)
    dead, number, body, _ = (int(n) for n in place.split(":"))
    hit = [said for said in found if said["number"] == number and said["group"] != dead]
    left = len(range(dead, PIECES, 3)) - body
    assert len(hit) == 2
    assert {said["bodies"] for said in hit} <= {-(-PIECES // 3) + left, -(-PIECES // 3) + left - 1}, hit


@pytest.mark.long
def test_a_group_frozen_in_a_shared_evaluation_is_not_waited_for_long(
    shared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it goes on, nobody answers to what it asks: it evaluates the rest by itself, and comes back healed."""
    monkeypatch.setenv("FT_LIVENESS_S", "1")
    shared(KILL="1:1:2:1", SIGNAL="SIGSTOP", EPOCHS="80")
    frozen: list[int] = []
    with job(SCRIPT, "--replicas", "3", "--max-restarts", "0", "--standby", "0") as running:
        running.when(r"\] goes (\d+)", lambda match: frozen.append(int(match[1])))
        running.when(r'evaluated {"group": 0, "number": 2,', lambda _: os.kill(frozen[0], signal.SIGCONT))
        assert running.run() == 0, running.text
    found = check_exact(running, ends=3)
    assert all(said["ids"] == list(range(SAMPLES)) for said in found)
    assert {said["bodies"] for said in found if said["number"] == 79} == {-(-PIECES // 3)}


@pytest.mark.long
def test_workers_that_stay_read_what_a_lost_group_had(shared: Callable[..., None]) -> None:
    shared(KILL="2:1:1:0", WORKERS="1")
    with job(SCRIPT, "--replicas", "3", "--standby", "0") as running:
        assert running.run() == 0, running.text
    assert running.count("was ended by SIGKILL") == 1
    found = check_exact(running, ends=len(re.findall(r"/0\] done", running.text)))
    assert all(said["ids"] == list(range(SAMPLES)) for said in found)


def test_groups_of_two_processes(shared: Callable[..., None]) -> None:
    """All processes of a group have all results; 50 samples are no multiple of what four of them read at a time."""
    shared(KILL="0:1:1:1")
    options = ("--replicas", "2", "--nproc-per-replica", "2", "--max-restarts", "0", "--success", "min")
    with job(SCRIPT, *options, "--standby", "0") as running:
        assert running.run() == 0, running.text
    found = check_exact(running, ends=len(re.findall(r"/0\] done", running.text)))
    assert all(said["ids"] == list(range(SAMPLES)) for said in found)
    pieces = -(-SAMPLES // (2 * BATCH))
    assert {said["bodies"] for said in found if said["number"] == 0} == {-(-pieces // 2)}
    assert {said["bodies"] for said in found if said["number"] == 1 and said["group"] == 1} == {pieces - 1}


@pytest.mark.parametrize("order", ["same", "another"])
def test_shuffled_data_is_shared_only_by_those_with_the_same_order(shared: Callable[..., None], order: str) -> None:
    shared(SHUFFLE=order)
    with job(SCRIPT, "--replicas", "2", "--max-restarts", "0", "--standby", "0") as running:
        assert running.run() == 0, running.text
    found = check_exact(running, ends=2)
    assert all(sorted(said["ids"]) == list(range(SAMPLES)) for said in found)
    assert {said["bodies"] for said in found} == {-(-PIECES // 2) if order == "same" else PIECES}
    assert running.count("read it in another order.*shuffle=False") == (0 if order == "same" else 2)


@pytest.mark.parametrize("place", ["-1:0:0:0", pytest.param("0:2:1:0", marks=pytest.mark.long)])
def test_predictions_of_trainer_are_those_of_one_group_alone(shared: Callable[..., None], place: str) -> None:
    """Logits, labels, loss and metrics, to the bit; also with a group that is killed meanwhile."""
    shared(KILL=place)
    with job(f"{SCRIPT} trainer", "--replicas", "3", "--standby", "0") as running:
        assert running.run() == 0, running.text
    assert running.count("was ended by SIGKILL") == (place[0] != "-")
    found = check_exact(running, ends=len(re.findall(r"/0\] done", running.text)))
    pieces = -(-(SAMPLES - 23) // 2)
    assert {said["bodies"] for said in found if said["number"] == 1} == {-(-pieces // 3)}
    assert len([said for said in found if said["number"] == 2]) == (3 if place[0] == "-" else 2)
