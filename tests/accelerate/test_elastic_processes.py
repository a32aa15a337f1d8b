"""A script on elastic data under ftrun, killed again and again over three epochs: every sample is committed once."""

from __future__ import annotations

import os
import pathlib
import re
import signal

import pytest

from tests.launch.job import Job, job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/accelerate/elastic_script.py"


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A file that ends the slow steps."""
    path = tmp_path / "hurry"
    settings = {"LENGTH": "900", "EPOCHS": "3", "BATCH": "4", "PACE_S": "0.1", "HURRY": str(path)}
    ours = {"ACCELERATE_FT_ELASTIC_DATA": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in {**settings, **ours}.items():
        monkeypatch.setenv(name, value)
    return path


def pid_of(running: Job, name: str, rank: int = 0) -> int:
    return next(g for g in running.supervisor._groups.values() if g.name == name).agent.pids()[rank]


def check(running: Job, ends: int) -> None:
    verdicts = re.findall(r"\] faults (.*)", running.text)
    assert verdicts == ["0"] * ends, verdicts
    assert len(set(re.findall(r"\] done (\w+)", running.text))) == 1


def test_every_sample_is_committed_once_through_kills(hurry: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two groups in turn, three times: as soon as it has trained with the other, that one is killed."""
    monkeypatch.setenv("ACCELERATE_FT_GLOBAL_BATCH_SIZE", "18")
    monkeypatch.setenv("WORKERS", "1")

    def kill(match: re.Match[str]) -> None:
        os.kill(pid_of(running, f"replica-{1 - int(match[1])}"), signal.SIGKILL)

    with job(SCRIPT, "--replicas", "2", "--timeout", "20", "--standby", "0") as running:
        story: list[str] = []
        for group in (0, 1, 0):
            newcomer = [rf"\[replica-{group}\] started"] if story else []
            story += [*newcomer, rf"replica-({group})/0\] on \d 2"]
            running.when(story[-1], kill, after=story[:-1])
        story += [r"\[replica-1\] started", r"replica-1/0\] on \d 2"]
        running.when(story[-1], lambda _: hurry.touch(), after=story[:-1])
        assert running.run() == 0, running.text
    assert running.count("was ended by SIGKILL") == 3
    check(running, 2)


def test_groups_of_two_processes_with_uneven_shares(hurry: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last steps of an epoch have fewer samples than processes, or uneven shares; one rank is killed."""
    for name, value in {"LENGTH": "323", "ACCUMULATE": "2", "OWN": "1", "ACCELERATE_FT_ELASTIC_DATA": ""}.items():
        monkeypatch.setenv(name, value)

    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-0", 1), signal.SIGKILL)

    # with an ElasticDataLoader of the script's own
    with job(SCRIPT, "--replicas", "2", "--nproc-per-replica", "2", "--timeout", "20", "--standby", "0") as running:
        story = [r"replica-1/1\] on 0 2", r"\[replica-0\] started", r"replica-0/1\] on \d 2"]
        running.when(story[0], kill)
        running.when(story[-1], lambda _: hurry.touch(), after=story[:-1])
        assert running.run() == 0, running.text
    assert running.count("was ended by SIGKILL") == 1
    check(running, 4)
