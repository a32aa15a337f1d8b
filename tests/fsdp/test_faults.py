"""A sharded model in groups of two ranks: one rank freezes, another is killed; the others train on, and all agree."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
LIVENESS_S = 1.0
SLACK_S = 3.0
"""For two cores that are both busy."""
TOGETHER = 8
"""Batches that both groups train after one of them is back."""


def send(running: Job, rank: str, number: signal.Signals) -> None:
    """`rank`: group and rank."""
    os.kill(int(re.findall(rf"\] pid {rank} (\d+)", running.text)[-1]), number)


def end_soon(end: pathlib.Path) -> Callable[[re.Match[str]], None]:
    """Lets all train TOGETHER batches more than the line says, which is of a commit. `end`: END in the environment."""

    def act(commit: re.Match[str]) -> None:
        end.with_suffix(".new").write_text(str(int(commit[1]) + TOGETHER))
        end.with_suffix(".new").rename(end)

    return act


def digests(running: Job) -> dict[tuple[int, int], list[str]]:
    """(batch, rank) -> of each group that has committed it."""
    found: dict[tuple[int, int], list[str]] = {}
    for batch, rank, digest in re.findall(r"\] commit (\d+) \d (\d) (\w+)", running.text):
        found.setdefault((int(batch), int(rank)), []).append(digest)
    return found


def test_a_rank_freezes_and_another_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Each time its group ends as a whole, is started again, and heals shard to shard."""
    end = tmp_path / "end"
    settings = {"FT_LIVENESS_S": str(LIVENESS_S), "BATCHES": "100000", "FREEZE": "1 0 5", "PACE_S": "0.1"}
    for name, value in {"PYTHONPATH": str(ROOT), "END": str(end), **settings}.items():
        monkeypatch.setenv(name, value)
    at: list[float] = []
    with job(ROOT / "tests/fsdp/loop_job.py", "--replicas", "2", "--nproc-per-replica", "2") as running:
        running.when(r"\] freezes 1 0 5", lambda _: at.append(time.monotonic()))
        running.when(r"replica-1\] rank \d \(pid \d+\) was ended by SIGKILL", lambda _: at.append(time.monotonic()))
        healed = [r"back: replica-1 ", r"replica-1:\w+: healed to step"]
        running.when(r"\] commit \d+ 1 1 ", lambda _: send(running, "0 1", signal.SIGKILL), after=healed)
        running.when(
            r"\] commit (\d+) 0 1 ", end_soon(end), after=[r"back: replica-0 ", r"replica-0:\w+: healed to step"]
        )
        assert running.run() == 0, running.text
    assert len(at) == 2, running.text
    assert at[1] - at[0] < 2 * LIVENESS_S + SLACK_S, running.text
    assert running.count("group rank 0 of replica-1:.* is gone or frozen, and rank 1 has not come") == 1
    assert running.count(r"back: replica-0 ") == 1, running.text
    found = digests(running)
    assert [key for key, held in found.items() if len(set(held)) > 1] == []
    assert sum(len(held) == 2 for held in found.values()) >= 2 * TOGETHER, running.text
    ends = re.findall(r"\] done \d (\d) (\d+ \w+)", running.text)
    assert len(ends) == 4, running.text
    assert len(set(ends)) == 2


def test_the_leader_freezes_while_another_rank_waits_for_its_vote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """That rank concludes it from the leader's silence, not after connect_s (20 s here): its group ends as a whole."""
    end = tmp_path / "end"
    settings = {"FT_LIVENESS_S": str(LIVENESS_S), "BATCHES": "100000", "FREEZE": "1 0 5", "STOPS": "vote"}
    for name, value in {"PYTHONPATH": str(ROOT), "END": str(end), "PACE_S": "0.1", **settings}.items():
        monkeypatch.setenv(name, value)
    at: list[float] = []
    with job(ROOT / "tests/fsdp/loop_job.py", "--replicas", "2", "--nproc-per-replica", "2") as running:
        running.when(r"\] freezes 1 0 5", lambda _: at.append(time.monotonic()))
        running.when(r"replica-1\] rank \d \(pid \d+\) was ended by SIGKILL", lambda _: at.append(time.monotonic()))
        running.when(
            r"\] commit (\d+) 1 1 ", end_soon(end), after=[r"back: replica-1 ", r"replica-1:\w+: healed to step"]
        )
        assert running.run() == 0, running.text
    assert len(at) == 2, running.text
    assert at[1] - at[0] < 2 * LIVENESS_S + SLACK_S, running.text
    assert running.count("group rank 0 of replica-1:.* is frozen or cut off, and rank 1 has asked for the next") == 1
    ends = re.findall(r"\] done \d 1 (\d+ \w+)", running.text)
    assert len(ends) == 2, running.text
    assert len(set(ends)) == 1


def test_a_step_that_a_death_finds_open_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The other group is in its forward pass: it launches its gradients in the next quorum, and repeats nothing."""
    settings = {"BATCHES": "12", "DIES": "1 1 5", "HERE": str(tmp_path)}
    for name, value in {"PYTHONPATH": str(ROOT), **settings}.items():
        monkeypatch.setenv(name, value)
    options = ("--replicas", "2", "--nproc-per-replica", "2", "--max-restarts", "0", "--min-replicas", "1")
    with job(ROOT / "tests/fsdp/loop_job.py", *options) as running:
        running.run()
    assert running.count(r"\] commit 6 0 ") == 2, running.text
    assert running.count(r"\] veto 5") == 0, running.text
    assert running.count(r"\] done 0 \d 12 ") == 2, running.text


def test_a_state_function_that_gathers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first quorum, on each rank: else a heal would wait for ranks that are elsewhere."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FULL", "1")
    with job(ROOT / "tests/fsdp/loop_job.py", "--replicas", "1", "--nproc-per-replica", "2") as running:
        assert running.run() == 1, running.text
    assert running.count("the state function 'loop' communicates inside the group .all_gather_into_tensor") >= 1
    assert running.count("ConfigError") >= 2, running.text


def test_a_group_that_is_sharded_otherwise_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Whichever comes first trains; it goes on after the other one was refused, however late that comes."""
    end = tmp_path / "end"
    for name, value in {"PYTHONPATH": str(ROOT), "ODD": "1", "BATCHES": "100000", "END": str(end)}.items():
        monkeypatch.setenv(name, value)
    options = ("--replicas", "2", "--min-replicas", "1", "--nproc-per-replica", "2", "--max-restarts", "0")

    def over(_: object) -> None:
        committed = [int(number) for number in re.findall(r"\] commit (\d+) ", running.text)]
        end.with_suffix(".new").write_text(str(max(committed, default=0) + TOGETHER))
        end.with_suffix(".new").rename(end)

    with job(ROOT / "tests/fsdp/loop_job.py", *options) as running:
        running.when(r"RefusedError: replica-\d:", over)
        running.run()
    assert running.count(r"RefusedError: replica-\d:.* on mesh \(2,\) \((odd|shard)\) of \[0, 1\] .* start every") >= 1
    ended = re.findall(r"\] done (\d) \d \d+ ", running.text)
    assert len(ended) == 2, running.text
    assert len(set(ended)) == 1, "the two ranks of one group"


def test_batch_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Committed is the mean over all samples, of groups that had three times as many and others."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    with job(ROOT / "tests/fsdp/weights_job.py", "--replicas", "2", "--nproc-per-replica", "2") as running:
        assert running.run() == 0, running.text
    found = re.findall(r"\] weighted \d \d (\S+) (\S+)", running.text)
    assert len(found) == 4, running.text
    assert all(float(error) < 1e-6 < 1e-3 < float(norm) for error, norm in found), running.text


@pytest.mark.parametrize(("weights", "wrong", "right"), [("3,2 1,1", "3, 2", [1]), ("3,1 1,3", "(3, 1|1, 3)", [])])
def test_batch_weights_that_differ_in_a_group_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, weights: str, wrong: str, right: list[int]
) -> None:
    """Each shard would count its group otherwise than the others do. A group that sets them right loses a step."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("WEIGHTS", weights)
    options = ("--replicas", "2", "--nproc-per-replica", "2", "--max-restarts", "0")
    with job(ROOT / "tests/fsdp/weights_job.py", *options) as running:
        assert running.run() == 1, running.text
    assert running.count(rf"UsageError: set_batch_weight: .* group have set {wrong} ") >= 1, running.text
    for rank in range(2):
        assert [running.count(rf"\] vetoed {group} {rank}") for group in range(2)] == [0, len(right)], running.text
    assert running.count("] weighted ") == 0, running.text
