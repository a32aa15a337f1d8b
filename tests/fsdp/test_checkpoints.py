"""Checkpoints of a whole job: written by two ranks, one of which is killed, loaded by one, three, and plain torch."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ft_core.loop import latest
from tests.fsdp.loop_job import SAVE_EVERY
from tests.fsdp.modes import MODES, Net
from tests.fsdp.test_faults import end_soon
from tests.launch.job import Job, job

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]


Trains = Callable[..., Job]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    for name, value in {"PYTHONPATH": str(ROOT), "PACE_S": "0.01"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "checkpoints"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> Trains:
    """Trains up to a batch. `kill`: a line at which a rank of the leading group is killed.

    `until`: when lines that match have come, TOGETHER batches more are trained.
    """

    def train(batches: int, *options: str, kill: str = "", until: Sequence[str] = ()) -> Job:
        monkeypatch.setenv("BATCHES", str(batches))
        monkeypatch.setenv("SAVE", str(folder))
        with job(ROOT / "tests/fsdp/loop_job.py", *options) as running:
            if kill:

                def act(_: Any) -> None:
                    os.kill(int(re.findall(r"\] pid 0 1 (\d+)", running.text)[-1]), signal.SIGKILL)

                running.when(kill, act)
            if until:
                monkeypatch.setenv("END", str(folder.parent / "end"))
                running.when(r"\] commit (\d+) 0 1 ", end_soon(folder.parent / "end"), after=until)
            assert running.run() == 0, running.text
        return running

    return train


def digests(running: Job, word: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for batch, digest in re.findall(rf"\] {word} \d (\d+) (\w+)", running.text):
        found.setdefault(int(batch), set()).add(digest)
    return found


@pytest.mark.parametrize("asynchronous", [pytest.param("", marks=pytest.mark.long), "1"])
def test_any_number_of_ranks_goes_on_from_what_two_have_written(
    monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, train: Trains, asynchronous: str
) -> None:
    """The leading group loses a rank just after a commit that is saved: the other one has made sure of it."""
    monkeypatch.setenv("ASYNC", asynchronous)
    two = ("--nproc-per-replica", "2")
    saved = digests(train(24, "--replicas", "2", *two, kill=r"\] saving 0 8 "), "saving")
    assert {batch: len(found) for batch, found in saved.items()} == {8: 1, 16: 1, 24: 1}
    kinds = ("batch", "once") if asynchronous else ("batch",)
    names = {f"{kind}_{batch}" for kind in kinds for batch in saved} | {"latest"}
    there = {path.name for path in folder.iterdir()}
    assert names - there <= ({"batch_8", "once_8"} if asynchronous else set()), (
        "an asynchronous write ends with its leader"
    )
    assert there <= names, "nothing is left of what was not finished"
    assert latest(folder) == str(folder / "batch_24")
    for ranks, batches in ((3, 32), (1, 40)):
        running = train(batches, "--replicas", "1", "--nproc-per-replica", str(ranks))
        before, saved = saved, digests(running, "saving")
        loaded = digests(running, "loaded")
        assert loaded == {batches - SAVE_EVERY: before[batches - SAVE_EVERY]}, running.text
    whole = folder.parent / "whole.pt"
    # What three have written plain torch reads, too.
    dcp_to_torch_save(folder / "batch_40", whole)
    state = torch.load(whole)
    net = Net(MODES["clip"])
    net.load_state_dict(state["model"])
    assert state["progress"] == {"batch": 40}
    assert set(state["optimizer"]["state"]) == {name for name, _ in net.named_parameters()}


def test_a_disk_without_room(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, train: Trains) -> None:
    """The leading group ends, and its successor trains on; nothing is left of what could not be written."""
    monkeypatch.setenv("NO_ROOM", str(SAVE_EVERY))
    monkeypatch.setenv("PACE_S", "0.1")
    back = ("back: ", r"replica-0:\w+: healed to step")
    running = train(100_000, "--replicas", "2", "--nproc-per-replica", "2", until=back)
    assert running.count(r"CheckpointException ranks") > 0, running.text
    assert running.count("back: ") == 1, running.text
    (end,) = {int(batch) for batch in re.findall(r"\] done \d \d (\d+) ", running.text)}
    saved = {f"batch_{batch}" for batch in range(2 * SAVE_EVERY, end + 1, SAVE_EVERY)}
    assert saved
    assert {path.name for path in folder.iterdir()} == {*saved, "latest"}
    assert running.count(rf"\] done \d \d {end} ") == 4


def test_a_job_that_is_lost_as_a_whole_goes_on_from_its_newest_checkpoint(
    monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path
) -> None:
    """Nobody has the state any more, and the lighthouse knows of steps that were committed.

    They train until both groups are back: one may begin alone while the other one still starts.
    """
    monkeypatch.setenv("BATCHES", "100000")
    monkeypatch.setenv("SAVE", str(folder))
    monkeypatch.setenv("END", str(folder.parent / "end"))
    with job(ROOT / "tests/fsdp/loop_job.py", "--replicas", "2", "--nproc-per-replica", "2") as running:

        def kill(_: Any) -> None:
            for pid in re.findall(r"\] pid \d \d (\d+)", running.text):
                os.kill(int(pid), signal.SIGKILL)

        running.when(r"\] commit 11 0 0 ", kill)
        all_four = (r"\] loaded \d ",) * 4
        running.when(r"\] commit (\d+) 0 1 ", end_soon(folder.parent / "end"), after=all_four)
        assert running.run() == 0, running.text
    loaded = [int(batch) for batch in re.findall(r"\] loaded \d (\d+) ", running.text)]
    assert (len(loaded), min(loaded)) == (4, SAVE_EVERY), running.text
    assert all(batch % SAVE_EVERY == 0 for batch in loaded), "who starts late finds what the other one has saved since"
    ends = re.findall(r"\] done \d (\d) (\d+ \w+)", running.text)
    assert len(ends) == 4, running.text
    assert len(set(ends)) == 2
