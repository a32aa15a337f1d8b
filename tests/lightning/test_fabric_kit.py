"""What Fabric has of the kit, in real jobs that lose a process: turns, an agreed end, checkpoints, runs, validation."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*srun:UserWarning"),
    pytest.mark.usefixtures("forged_workers"),
]
ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/lightning/fabric_kit_job.py"


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., None]:
    """Which loop the job runs, with further variables of its environment."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FOLDER", str(tmp_path))

    def mode(name: str, **variables: str) -> None:
        monkeypatch.setenv("MODE", name)
        for key, value in variables.items():
            monkeypatch.setenv(key, value)

    return mode


def kill(found: re.Match[str]) -> None:
    os.kill(int(found[1]), signal.SIGKILL)


def ends(running: Job) -> list[str]:
    """`STEP DIGEST` of each replica at its end."""
    return re.findall(r"\] done (\d+ \w+)", running.text)


def test_models_that_are_trained_in_turns(mode: Callable[..., None]) -> None:
    mode("turns", STEPS="40")
    with job(PROGRAM, "--replicas", "3", "--max-restarts", "2") as running:
        running.when(r"replica-1/0\] step \d+ 3 (\d+)", kill)
        assert running.run() == 0, running.text
    assert running.count(r"replica-1\] started") == 2
    assert len(ends(running)) == 3
    assert len(set(ends(running))) == 1, running.text
    assert {line.split()[0] for line in ends(running)} == {"40"}


def test_all_stop_together(mode: Callable[..., None]) -> None:
    mode("early", STEPS="20")
    with job(PROGRAM, "--replicas", "3", "--min-replicas", "3") as running:
        assert running.run() == 0, running.text
    assert running.count(r"\] stopped 20$") == 2, running.text
    assert len(ends(running)) == 3
    assert len(set(ends(running))) == 1


def test_a_leader_that_dies_while_it_saves(mode: Callable[..., None], tmp_path: pathlib.Path) -> None:
    mode("saves", STEPS="40")

    def light(_: Any) -> None:
        (tmp_path / "fuse").touch()

    with job(PROGRAM, "--replicas", "3", "--max-restarts", "2") as running:
        running.when(r"\] step 16 3 ", light)
        assert running.run() == 0, running.text
    assert running.count(r"SIGKILL") == 1, running.text
    found = {path.name: torch.load(path) for path in tmp_path.glob("step_*.ckpt")}
    assert sorted(found) == sorted(f"step_{step}.ckpt" for step in range(5, 41, 5)), running.text
    assert {name: saved["step"] for name, saved in found.items()} == {f"step_{n}.ckpt": n for n in range(5, 41, 5)}
    assert found["step_40.ckpt"]["digest"] == ends(running)[0].split()[1]
    assert not list(tmp_path.glob(".*.partial"))


def test_each_run_of_a_process_has_a_room_of_its_own(mode: Callable[..., None]) -> None:
    """One that is killed in the second run passes over the first, and ends the second one like the others."""
    mode("runs", STEPS="15 100")
    with job(PROGRAM, "--replicas", "2", "--max-restarts", "2") as running:
        running.when(r"replica-1/0\] step 7 2 (\d+)", kill, after=[r"replica-1/0\] done 15"])
        assert running.run() == 0, running.text
    assert running.count("this training run is passed over, as the others are in a later one") == 1, running.text
    first, second = (re.findall(rf"\] done {steps} (\w+) (\d+)", running.text) for steps in (15, 100))
    assert first == [first[0]] * 2, running.text
    assert second == [second[0]] * 2, running.text
    assert second[0][1] == "115"


def test_the_others_wait_for_one_that_validates(mode: Callable[..., None]) -> None:
    mode("validates", STEPS="12", FT_TIMEOUT_S="1.5", VALIDATE_S="3")
    with job(PROGRAM, "--replicas", "2", "--min-replicas", "2") as running:
        assert running.run() == 0, running.text
    assert running.count(r"\] veto ") == 0, running.text
    assert len(set(ends(running))) == 1


def test_a_loop_that_counts_its_batches_goes_on_at_the_furthest_one(mode: Callable[..., None]) -> None:
    mode("places", STEPS="40")
    with job(PROGRAM, "--replicas", "3", "--max-restarts", "2") as running:
        running.when(r"replica-1/0\] step \d+ 3 (\d+)", kill)
        assert running.run() == 0, running.text
    assert len(ends(running)) == 3
    assert len(set(ends(running))) == 1, running.text
