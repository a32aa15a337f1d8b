"""A plain script under ftrun with real processes: kill, freeze, restart, late join; the data goes on without a gap and
all replicas end bit-identical. Also where the leader dies while it saves, and one rank of several."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import re
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from safetensors.torch import load_file
from torch.utils.data import BatchSampler

from ft_accelerate.checkpoint_folders import MANAGER
from ft_core.launch.control_socket import order_resize
from tests.accelerate.script import SAVE_EVERY, Net
from tests.accelerate.script import digest as digest_of
from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.timeout(180), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/accelerate/script.py"
SAMPLES, BATCH, ACCUMULATE = 336, 4, 2


@dataclass(frozen=True, order=True)
class Place:
    """Where a process was."""

    epoch: int
    batch: int
    shards: int = field(compare=False)

    def next(self) -> tuple[int, int]:
        last = self.batch + 1 == -(-SAMPLES // BATCH // self.shards)
        return (self.epoch + 1, 0) if last else (self.epoch, self.batch + 1)


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[Job], None]:
    """Lets all workers end after the second epoch from here."""
    path = tmp_path / "end"
    settings = {"END_FILE": str(path), "SAMPLES": str(SAMPLES), "PACE_S": "0.01", "OMP_NUM_THREADS": "1"}
    for name, value in {**settings, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)

    def end(running: Job) -> None:
        newest = max(int(e) for e in re.findall(r"\] on \d (\d+) ", running.text))
        partial = path.with_suffix(".tmp")
        partial.write_text(str(newest + 2))
        partial.rename(path)

    return end


def pid_of(running: Job, name: str, rank: int = 0) -> int:
    return next(g for g in running.supervisor._groups.values() if g.name == name).agent.pids()[rank]


@functools.cache
def epoch_of(group: int, groups: int, epoch: int) -> list[list[int]]:
    """The batches that Accelerate gives to one of so many processes."""
    sampler = SeedableRandomSampler(range(SAMPLES), data_seed=7)
    sampler.set_epoch(epoch)
    return list(BatchSamplerShard(BatchSampler(sampler, BATCH, False), groups, group))


def lives(running: Job) -> dict[int, list[list[Place]]]:
    """What each process of each group trained on, in order. Every batch must hold what the group's sampler says."""
    found: dict[int, list[list[Place]]] = defaultdict(list)
    for line in running.lines.all:
        if began := re.search(r"\[replica-(\d)\] started", line):
            found[int(began[1])].append([])
        if on := re.search(r"\[replica-\d/0\] on (\d) (\d+) (\d+) \d (\d) ([\d ]+)$", line):
            group, epoch, batch, shards = (int(on[i]) for i in range(1, 5))
            assert [int(i) for i in on[5].split()] == epoch_of(group % shards, shards, epoch)[batch], line
            found[group][-1].append(Place(epoch, batch, shards))
    shards_of = {(p.epoch, p.shards) for group in found.values() for life in group for p in life}
    assert len({epoch for epoch, _ in shards_of}) == len(shards_of)  # the same number for all, all through an epoch
    return found


def jumps(life: list[Place]) -> int:
    """How often a life went on further ahead than at the next batch; back is never allowed."""
    count = 0
    for before, after in itertools.pairwise(life):
        if (after.epoch, after.batch) != before.next():
            assert after > before
            assert after.batch % ACCUMULATE == 0, after  # where a window begins
            count += 1
    return count


def check_ends(running: Job, ends: int) -> None:
    digests = re.findall(r"\] done (.*)", running.text)
    assert len(digests) == ends, running.text
    assert len(set(digests)) == 1, digests


def test_a_kill_a_freeze_and_a_late_join(end: Callable[[Job], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders that are prepared for evaluation meanwhile keep nobody out."""
    monkeypatch.setenv("EVALUATE", "1")
    stopped: list[int] = []

    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-0"), signal.SIGKILL)

    def grow(_: re.Match[str]) -> None:
        order_resize(3, "accelerating")

    def stop(_: re.Match[str]) -> None:
        stopped.append(pid_of(running, "replica-1"))
        os.kill(stopped[0], signal.SIGSTOP)

    def go_on(_: re.Match[str]) -> None:
        os.kill(stopped[0], signal.SIGCONT)

    options = ("--replicas", "2:3", "--run-id", "accelerating", "--timeout", "20", "--standby", "0")
    with job(SCRIPT, *options) as running:
        story = [r"replica-1/0\] on 1 1 13 2 ", r"\[replica-0\] started", r"replica-0/0\] on 0 \d+ \d+ 2 "]
        running.when(story[0], kill)
        running.when(story[-1], grow, after=story[:-1])
        running.when(r"replica-2/0\] on 2 \d+ \d+ 3 ", stop)
        story = [r"2/0\] on 2 \d+ \d+ 3 ", *(rf"0/0\] on 0 \d+ {place}" for place in (r"\d+ 2 ", "6 2 "))]
        running.when(story[-1], go_on, after=story[:-1])
        running.when(r"replica-1/0\] on 1 \d+ \d+ 3 ", lambda _: end(running), after=story)
        assert running.run() == 0, running.text
    check_ends(running, 3)
    told = lives(running)
    assert [len(told[group]) for group in range(3)] == [2, 1, 1]
    start = Place(0, 0, 0)
    assert told[0][0][0] == told[1][0][0] == start
    assert jumps(told[0][0]) == jumps(told[0][1]) == jumps(told[2][0]) == 0
    assert jumps(told[1][0]) == 1  # while it stood still
    for life in (told[0][1], told[2][0]):
        assert life[0] > start
        assert life[0].batch % ACCUMULATE == 0
    assert len({group[-1][-1] for group in told.values()}) == 1
    assert [told[0][0][0].shards, *{group[-1][-1].shards for group in told.values()}] == [2, 3]


def test_the_leader_dies_while_it_saves(
    end: Callable[[Job], None], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The next leader saves the same again before it goes on, and what is in place is always whole."""
    for name, value in {"SAVE": str(tmp_path), "FUSE": "1"}.items():
        monkeypatch.setenv(name, value)
    with job(SCRIPT, "--replicas", "2", "--timeout", "20", "--standby", "0") as running:
        back = [r"was ended by SIGKILL", r"0/0\] on 0 \d+ \d+ 2 "]
        running.when(back[-1], lambda _: end(running), after=back[:-1])
        assert running.run() == 0, running.text
    check_ends(running, 2)
    assert running.count("was ended by SIGKILL") == 1
    told: dict[int, set[str]] = defaultdict(set)
    for number, digest in re.findall(r"\] saved \d (\d+) (\w+)", running.text):
        told[int(number)].add(digest)
    assert len(told) > 2
    assert running.count(r"0/0\] saved 0 1 ") == 0  # it died there
    folders = {int(path.name.rpartition("_")[2]): path for path in (tmp_path / "checkpoints").iterdir()}
    assert folders.keys() == told.keys()
    assert not list(tmp_path.glob(".*partial"))
    names = {tuple(sorted(path.name for path in folder.iterdir())) for folder in folders.values()}
    assert len(names) == 1, names
    for number, folder in folders.items():
        model = Net()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        assert told[number] == {digest_of(model)}
        assert json.loads((folder / MANAGER).read_text())["step"] == (number + 1) * SAVE_EVERY


def test_one_rank_of_a_group_of_two_dies(end: Callable[[Job], None]) -> None:
    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-0", 1), signal.SIGKILL)

    with job(SCRIPT, "--replicas", "2", "--nproc-per-replica", "2", "--timeout", "20", "--standby", "0") as running:
        story = [r"1/1\] on 1 1 6 2 ", r"\[replica-0\] started", *(rf"{g}/1\] on {g} \d+ \d+ 2 " for g in (0, 1))]
        running.when(story[0], kill)
        running.when(story[-1], lambda _: end(running), after=story[:-1])
        assert running.run() == 0, running.text
    check_ends(running, 4)
    assert running.count("was ended by SIGKILL") == 1
    assert running.count(r"\[replica-0\] started") == 2
    assert running.count(r"\[replica-1\] started") == 1
    assert running.count(r"1/\d\] on 1 \d+ \d+ 1 ")  # the others went on alone
