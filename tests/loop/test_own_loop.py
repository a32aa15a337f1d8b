"""The loop of docs/own-loop.md, as its example runs: killed, and with bad input."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import signal
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ft_core.coordination import LighthouseServer
from ft_core.errors import ConfigError, UsageError
from ft_core.loop import TrainingLoop
from ft_core.loop.leadership import Leadership
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.runs import Runs
from tests.launch.job import job

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/own_loop/train.py"
JOB = ROOT / "tests/loop/runs_job.py"
LATE_RANK_JOB = ROOT / "tests/loop/late_rank_job.py"


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forged_workers")
def test_the_example_is_killed_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The leader dies, and one that follows: the same end everywhere, every checkpoint is there, and of its batch."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("BATCHES", "1400")
    with job(EXAMPLE, "--replicas", "3", "--max-restarts", "4") as running:

        def kill(name: str) -> None:
            os.kill(int(re.findall(rf"{name}/0\] pid (\d+)", running.text)[-1]), signal.SIGKILL)

        running.when(r"batch 200: loss", lambda found: kill(leader(running.text, found[0])))
        running.when(r"batch 600: loss", lambda _: kill("replica-2"))
        assert running.run() == 0, running.text
    ends = re.findall(r"\] done (\d+) (\S+)", running.text)
    assert len(ends) == 3, running.text
    assert set(ends) == {("1400", ends[0][1])}, running.text
    assert running.count(r"SIGKILL") >= 2
    found = {path.name: torch.load(path)["batch"] for path in tmp_path.glob("*.pt")}
    assert found == {f"batch_{n}.pt": n for n in range(200, 1401, 200)}, running.text
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"


def leader(text: str, line: str) -> str:
    """The replica that said this line."""
    found = re.findall(rf"\[(replica-\d)/0\] {re.escape(line)}", text)
    return str(found[-1])


@pytest.fixture
def job_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    for name, value in {"OMP_NUM_THREADS": "1", "FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def check_files(folder: pathlib.Path) -> None:
    """All checkpoints of both trainings are whole, and nothing else is left."""
    for run in range(2):
        found = {path.name: torch.load(path)["batch"] for path in (folder / f"run_{run}").iterdir()}
        assert found == {f"{n}.pt": n for n in range(4, 25, 4)}


@pytest.mark.process
@pytest.mark.usefixtures("forged_workers")
def test_a_replica_that_comes_back_joins_the_run_that_the_others_are_in(
    monkeypatch: pytest.MonkeyPatch, job_folder: pathlib.Path
) -> None:
    """It passes over the first of two trainings, which is finished, and ends the second one like the others."""
    monkeypatch.setenv("FATAL", "1:5")
    monkeypatch.setenv("PACE_S", "0.1")
    with job(JOB, "--replicas", "2") as running:
        assert running.run() == 0, running.text
    ends = re.findall(r"\] (run 1: .*)", running.text)
    assert ends == [ends[0]] * 2, running.text
    assert ends[0].startswith("run 1: 24 batches, 24 steps")
    assert running.count("this training run is passed over, as the others are in a later one") == 1
    check_files(job_folder)


@pytest.mark.process
@pytest.mark.long  # Lightning's test of the same decision runs each time
@pytest.mark.usefixtures("forged_workers")
def test_a_later_run_that_is_lost_with_all_who_were_in_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch, job_folder: pathlib.Path
) -> None:
    """They died within a moment: who comes back finds the first training finished, and nobody in the second."""
    monkeypatch.setenv("FATAL", "0:5 1:5")
    monkeypatch.setenv("PACE_S", "0.1")
    with job(JOB, "--replicas", "2", "--max-restarts", "1") as running:
        assert running.run() == 1, running.text
    assert running.count("RunLostError: every replica has died in a later training run than this one") >= 1
    assert job_folder.exists()


@pytest.mark.process
@pytest.mark.usefixtures("forged_workers")
def test_groups_of_two_ranks(job_folder: pathlib.Path) -> None:
    """Each process draws another model, and has more to write than the one before: one model, and whole files."""
    with job(JOB, "--replicas", "2", "--nproc-per-replica", "2") as running:
        assert running.run() == 0, running.text
    for run in range(2):
        ends = re.findall(rf"\] (run {run}: .*)", running.text)
        assert len(ends) == 4, running.text
        assert len(set(ends)) == 1, running.text
    check_files(job_folder)


@pytest.mark.process
@pytest.mark.usefixtures("forged_workers")
def test_the_leader_dies_while_it_saves_in_groups_of_two_ranks(
    monkeypatch: pytest.MonkeyPatch, job_folder: pathlib.Path
) -> None:
    """Its group is started again; every checkpoint is whole, and nothing of the half-written one is left."""
    fuse = job_folder / "fuse"
    monkeypatch.setenv("FUSE", str(fuse))
    monkeypatch.setenv("PACE_S", "0.1")
    with job(JOB, "--replicas", "2", "--nproc-per-replica", "2", "--max-restarts", "2") as running:
        fuse.touch()
        assert running.run() == 0, running.text
    assert not fuse.exists()
    ends = re.findall(r"\] (run 1: .*)", running.text)
    assert len(ends) == 4, running.text
    assert len(set(ends)) == 1, running.text
    assert running.count("SIGKILL") >= 1
    check_files(job_folder)


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("forged_workers")
def test_a_rank_that_comes_late_hears_from_its_leader_that_the_others_have_finished(job_folder: pathlib.Path) -> None:
    """The leader, which was told so by the lighthouse, does not end before its ranks know it."""
    for name in ("finished", "late"):
        os.mkfifo(job_folder / name)
    with job(LATE_RANK_JOB, "--replicas", "2", "--nproc-per-replica", "2", "--max-restarts", "1") as running:
        told = r"waits up to .* s for group rank 1, to tell it the same|nothing left to train"

        def comes(_: re.Match[str]) -> None:
            (job_folder / "late").write_bytes(b"!")

        running.when(told, comes)
        assert running.run() == 0, running.text
    assert running.count(r"waits up to .* s for group rank 1, to tell it the same") == 1, running.text
    assert running.count(r"replica-1/[01]\] .*nothing left to train") == 2, running.text


@pytest.mark.process
@pytest.mark.usefixtures("forged_workers")
def test_the_others_wait_for_one_that_does_something_by_itself(
    monkeypatch: pytest.MonkeyPatch, job_folder: pathlib.Path
) -> None:
    """Longer than a collective waits for a silent peer."""
    monkeypatch.setenv("FT_TIMEOUT_S", "1.5")
    monkeypatch.setenv("VALIDATE_S", "3")
    with job(JOB, "--replicas", "2", "--min-replicas", "2") as running:
        assert running.run() == 0, running.text
    assert running.count(r"\] veto ") == 0, running.text
    ends = re.findall(r"\] (run 0: .*)", running.text)
    assert ends == [ends[0]] * 2, running.text
    check_files(job_folder)


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state\['step'\]=int has no state_dict\(\)"):
        TrainingLoop({"step": 3})  # type: ignore[dict-item]


def test_arguments_that_are_the_loops_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"TrainingLoop\(rank=...\) cannot be given"):
        TrainingLoop({}, rank=3)


@pytest.mark.parametrize("position", [-1, True, 1.5, "3", 2**63])
def test_positions(position: Any) -> None:
    with pytest.raises(ConfigError, match=r"the position must be a whole number from 0 to 2\^62"):
        TrainingLoop({}).open(position)


def test_a_batch_without_a_model() -> None:
    with pytest.raises(UsageError, match=r"before loop.wrap\(model\), or loop.replicate\(model\) of a sharded one"):
        TrainingLoop({}).open()


def test_a_sharded_run_that_is_passed_over_has_no_model() -> None:
    """`replicate` has nothing to replicate it with: the others have finished."""
    loop = TrainingLoop({})
    loop._run.passed_over = loop._run.window.stopped = True
    assert loop.open() is None


def test_an_optimizer_of_parameters_that_nobody_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups would part without a word."""
    monkeypatch.setattr("ft_core.loop.run.RUNS", Runs())
    model, head, scale = nn.Linear(2, 1), nn.Linear(1, 1), nn.Parameter(torch.ones(2))
    server = LighthouseServer("127.0.0.1:0", boot_window_ms=0, token="")
    try:
        for more, words in (([*head.parameters()], "head.weight"), ([scale], r"a tensor \[2\]")):
            optimizer = torch.optim.SGD([*model.parameters(), *more], lr=0.1)
            state: Any = {"model": model, "head": head, "optimizer": optimizer}
            loop = TrainingLoop(state, lighthouse_addr=server.address(), replica_id="one", place=ReplicaGroup())
            loop.wrap(model)
            with pytest.raises(UsageError, match=rf"state\['optimizer'\] trains {words}, which no model has that was"):
                loop.open()
            for parameter in more:
                parameter.requires_grad = False
            assert loop.open() == 0
            loop.vote()
            loop.end()
    finally:
        server.shutdown()


def one_run(address: str) -> list[weakref.ref[Any]]:
    model = nn.Linear(2, 1)
    loop = TrainingLoop({"model": model}, lighthouse_addr=address, replica_id="one", place=ReplicaGroup())
    ddp = loop.wrap(model)
    with pytest.raises(ConfigError, match="this Linear is wrapped already"):
        loop.wrap(model)
    loop.open()
    ddp(torch.ones(1, 2)).sum().backward()
    assert loop.vote()
    loop.end()
    return [weakref.ref(loop), weakref.ref(model)]


def test_a_run_that_has_ended_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd keeps hooks where nothing collects them: whatever they know would stay with the model."""
    monkeypatch.setattr("ft_core.loop.run.RUNS", Runs())
    server = LighthouseServer("127.0.0.1:0", boot_window_ms=0, token="")
    try:
        kept = [ref for _ in range(2) for ref in one_run(server.address())]
        gc.collect()
        assert [ref() for ref in kept] == [None] * 4
    finally:
        server.shutdown()


def test_after_the_end_each_group_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nobody waits for the leader any more, and nobody makes good what it has not written."""
    monkeypatch.setattr("ft_core.loop.run.RUNS", Runs())
    server = LighthouseServer("127.0.0.1:0", boot_window_ms=0, token="")
    try:
        model = nn.Linear(2, 1)
        loop = TrainingLoop({"model": model}, lighthouse_addr=server.address(), replica_id="one", place=ReplicaGroup())
        ddp = loop.wrap(model)
        loop.open()
        ddp(torch.ones(1, 2)).sum().backward()
        assert loop.vote()
        monkeypatch.setattr(Leadership, "leads", property(lambda _: False))
        loop.save(tmp_path / "missed", lambda path: pathlib.Path(path).write_text("by the leader"))
        loop.end()
        loop.save(tmp_path / "end", lambda path: pathlib.Path(path).write_text("by each"))
    finally:
        server.shutdown()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("end", "by each")]


def test_it_is_opened_after_a_model_is_wrapped() -> None:
    with pytest.raises(UsageError, match=r"loop.open\(\) before loop.wrap\(model\)"):
        TrainingLoop({"model": nn.Linear(1, 1)}).open()
