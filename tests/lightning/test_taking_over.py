"""Taking over a run, with ftrun and real processes: each group's data goes on without a gap, all end bit-identical.

One run has a kill in the middle of an epoch, a replica that stands still for a while, and one that joins late; the
other one a kill and a return during a validation. What each process trained on is compared with what its group's
sampler says.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DistributedSampler

from ft_core.launch.control_socket import order_resize
from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.timeout(180), pytest.mark.usefixtures("forged_workers")]
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/lightning/adopting.py"
SAMPLES, BATCH, ACCUMULATE = 336, 4, 2


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[Job], None]:
    """Lets all workers end after the second epoch from here."""
    path = tmp_path / "end"
    monkeypatch.setenv("END_FILE", str(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def end(running: Job) -> None:
        newest = max(int(e) for e in re.findall(r"\] on \d (\d+) ", running.text))
        partial = path.with_suffix(".tmp")
        partial.write_text(str(newest + 2))
        partial.rename(path)

    return end


def pid_of(running: Job, name: str, rank: int = 0) -> int:
    return next(g for g in running.supervisor._groups.values() if g.name == name).agent.pids()[rank]


@dataclass(frozen=True, order=True)
class Place:
    """Where a process was."""

    epoch: int
    batch: int
    shards: int = field(compare=False)

    def next(self) -> tuple[int, int]:
        last = self.batch + 1 == SAMPLES // self.shards // BATCH
        return (self.epoch + 1, 0) if last else (self.epoch, self.batch + 1)


def expected(rank: int, place: Place) -> list[int]:
    sampler: DistributedSampler[Any] = DistributedSampler(range(SAMPLES), place.shards, rank, shuffle=True)  # type: ignore[arg-type]
    sampler.set_epoch(place.epoch)
    first = place.batch * BATCH
    return list(sampler)[first : first + BATCH]


def lives(running: Job) -> dict[int, list[list[Place]]]:
    """What each process of each group trained on, in order. Every batch must hold what the group's sampler says."""
    found: dict[int, list[list[Place]]] = defaultdict(list)
    for line in running.lines.all:
        if began := re.search(r"\[replica-(\d)\] started", line):
            found[int(began[1])].append([])
        if on := re.search(r"\[replica-\d/0\] on (\d) (\d+) (\d+) \d (\d)/(\d) ([\d ]+)$", line):
            group, epoch, batch, rank, shards = (int(on[i]) for i in range(1, 6))
            place = Place(epoch, batch, shards)
            assert rank == group % shards, line
            assert [int(i) for i in on[6].split()] == expected(rank, place), line
            found[group][-1].append(place)
    shards_of = {(p.epoch, p.shards) for group in found.values() for life in group for p in life}
    assert len({epoch for epoch, _ in shards_of}) == len(shards_of)  # the same number for all, all through an epoch
    return found


def gaps(life: list[Place]) -> int:
    """Jumps forward in one life; anything else but the next batch fails."""
    jumps = 0
    for before, after in itertools.pairwise(life):
        if (after.epoch, after.batch) != before.next():
            assert after > before
            assert after.batch % ACCUMULATE == 0, after
            jumps += 1
    return jumps


def check_ends(running: Job, ends: int) -> None:
    digests = re.findall(r"\] done (.*)", running.text)
    assert len(digests) == ends, running.text
    assert len(set(digests)) == 1, digests


def test_a_kill_a_stop_and_a_late_join(end: Callable[[Job], None]) -> None:
    """The data is divided in two, and in three from the epoch after the third group has joined."""
    stopped: list[int] = []

    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-0"), signal.SIGKILL)
        running.when(r"replica-0/0\] on 0 \d+ \d+ 2 ", grow, after=[r"\[replica-0\] started"])

    def grow(_: re.Match[str]) -> None:
        order_resize(3, "adopting")
        running.when(r"replica-2/0\] on 2 \d+ \d+ 3 ", stop)

    def stop(_: re.Match[str]) -> None:
        stopped.append(pid_of(running, "replica-1"))
        os.kill(stopped[0], signal.SIGSTOP)
        running.when(r"replica-0/0\] on 0 \d+ 6 2 ", go_on, after=[r"replica-0/0\] on 0 \d+ \d+ 2 "])

    def go_on(_: re.Match[str]) -> None:
        os.kill(stopped[0], signal.SIGCONT)
        running.when(r"replica-1/0\] on 1 \d+ \d+ 3 ", lambda _: end(running))

    options = ("--replicas", "2:3", "--run-id", "adopting", "--timeout", "20")
    with job(SCRIPT, *options) as running:
        running.when(r"replica-1/0\] on 1 1 13 2 ", kill)
        assert running.run() == 0, running.text
    check_ends(running, 3)
    told = lives(running)
    assert [len(told[group]) for group in range(3)] == [2, 1, 1]
    start = Place(0, 0, 0)
    assert told[0][0][0] == told[1][0][0] == start
    assert gaps(told[0][0]) == gaps(told[0][1]) == gaps(told[2][0]) == 0
    assert gaps(told[1][0]) == 1  # while it stood still
    for life in (told[0][1], told[2][0]):
        assert life[0] > start
        assert life[0].batch % ACCUMULATE == 0
    assert len({group[-1][-1] for group in told.values()}) == 1
    assert [told[0][0][0].shards, *{group[-1][-1].shards for group in told.values()}] == [2, 3]
    assert running.count(r"% of the training data was not read") >= 1


def test_a_kill_and_a_return_during_validation(end: Callable[[Job], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others validate for longer than a replica takes to come back; it waits for them and then joins."""
    monkeypatch.setenv("VALIDATION_S", "1")

    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-2"), signal.SIGKILL)
        running.when(r"replica-2/0\] on 2 ", lambda _: end(running))

    with job(SCRIPT, "--replicas", "3", "--timeout", "20") as running:
        running.when(r"replica-2/0\] validating 1 9", kill)
        assert running.run() == 0, running.text
    check_ends(running, 3)
    told = lives(running)
    assert gaps(told[0][0]) == gaps(told[1][0]) == gaps(told[2][0]) == gaps(told[2][1]) == 0
    assert told[2][0][-1] == Place(1, 9, 3)
    assert told[2][1][0] >= Place(1, 10, 3)


def test_a_rank_of_a_group_of_two_is_killed(end: Callable[[Job], None]) -> None:
    """Its whole group is started again, and both ranks take over in the middle of an epoch."""

    def kill(_: re.Match[str]) -> None:
        os.kill(pid_of(running, "replica-0", rank=1), signal.SIGKILL)
        running.when(r"\[replica-0\] started", lambda _: running.when(
            r"replica-0/1\] on 0 \d+ \d+ 2 ", lambda _: end(running)
        ))  # fmt: skip

    with job(SCRIPT, "--replicas", "2", "--nproc-per-replica", "2", "--timeout", "20") as running:
        running.when(r"replica-0/1\] on 0 1 4 2 ", kill)
        assert running.run() == 0, running.text
    check_ends(running, 4)
    assert running.count(r"\[replica-0\] started") == 2
    assert running.count(r"\[replica-1\] started") == 1
    told: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for line in running.lines.all:
        if on := re.search(r"\[replica-(\d)/(\d)\] on \d (\d+) (\d+) \d (\d)/(\d) ([\d ]+)$", line):
            group, rank, epoch, batch, shard, shards = (int(on[i]) for i in range(1, 7))
            assert (shard, shards) == (2 * group + rank, 4), line
            told[group, rank].append(Place(epoch, batch, shards))
            assert [int(i) for i in on[7].split()] == expected(shard, told[group, rank][-1]), line
    assert sorted(told) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert gaps(told[1, 0]) == gaps(told[1, 1]) == 0
    returned = [
        next(b for a, b in itertools.pairwise(told[0, rank]) if (b.epoch, b.batch) != a.next()) for rank in (0, 1)
    ]
    assert returned[0] == returned[1] > Place(1, 4, 4)
    assert returned[0].batch % ACCUMULATE == 0
    assert len({places[-1] for places in told.values()}) == 1
