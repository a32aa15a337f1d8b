"""Replica groups of two ranks each, started by torchrun, one of which loses a rank."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import WORKER, Cluster, Process

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def start_group(cluster: Cluster, name: str, **env: object) -> Process:
    """torchrun with two ranks and one restart; its output holds the lines of both. With a forge all come from it."""
    command = [sys.executable, "-u", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]
    return cluster.start_command(name, [*command, WORKER], PIDS=1, **env)


def digests(group: Process) -> dict[str, str]:
    """rank -> digest, as printed at the end."""
    rows = [line.split() for _, line in group.lines if line.startswith("done ")]
    return {row[2]: row[1] for row in rows}


def pids(group: Process) -> list[int]:
    """Of its two ranks, in order."""
    found = {int(line.split()[2]): int(line.split()[1]) for _, line in group.lines if line.startswith("pid ")}
    return [found[0], found[1]]


def _both_done(group: Process) -> bool:
    return len(digests(group)) == 2


def test_a_group_loses_a_rank_restarts_and_heals(forge: Forge) -> None:
    with Cluster(forge, STEP_MS=20, FT_NUM_REPLICA_GROUPS=2) as cluster:
        one, two = start_group(cluster, "one"), start_group(cluster, "two")
        one.wait_step(15)
        os.kill(pids(two)[1], signal.SIGKILL)  # rank 0 or 1 of group two: the agent restarts both
        two.wait_for(lambda: sum(line.startswith("ready") for _, line in two.lines) == 4, "restarted both ranks")
        back = two.step()
        two.wait_step(back + 1)
        cluster.end_at(one.step() + 40)
        for group in (one, two):
            assert group.popen.wait(60) == 0, "\n".join(group.errors[-25:])
            group.wait_for(functools.partial(_both_done, group), "printed both digests")
        assert digests(one) == digests(two)  # rank by rank: each rank holds its own part of the model
        histories: dict[tuple[str, int], set[str]] = {}
        for group in (one, two):
            for _, line in group.lines:
                if line.startswith("commit"):
                    _, step, _, lineage, rank = line.split()
                    histories.setdefault((rank, int(step)), set()).add(lineage)
        assert all(len(found) == 1 for found in histories.values())


def test_a_frozen_rank_holds_the_other_group_for_a_liveness_timeout_only(forge: Forge) -> None:
    """It does not lead its group: its leader reports it, and the group comes back as one when the rank is thawed."""
    with Cluster(forge, STEP_MS=20, FT_NUM_REPLICA_GROUPS=2, FT_LIVENESS_S=1) as cluster:
        one, two = start_group(cluster, "one"), start_group(cluster, "two")
        two.wait_step(15)
        frozen = pids(two)[1]
        os.kill(frozen, signal.SIGSTOP)
        at, before = time.monotonic(), one.step()
        one.wait_for(lambda: any(step > before + 2 and who == 1 for _, step, who, _ in one.commits()), "went on alone")
        standstill_s = max(b[0] - a[0] for a, b in itertools.pairwise(row for row in one.commits() if row[0] > at - 1))
        os.kill(frozen, signal.SIGCONT)
        assert standstill_s < 1.0 + 2.0, standstill_s  # liveness, and slack for a loaded machine
        alone = one.step()
        one.wait_for(
            lambda: any(step > alone and who == 2 for _, step, who, _ in one.commits()), "trained with both again"
        )
        cluster.end_at(one.step() + 40)
        for group in (one, two):
            assert group.popen.wait(60) == 0, "\n".join(group.errors[-25:])
            group.wait_for(functools.partial(_both_done, group), "printed both digests")
        assert digests(one) == digests(two)
        assert sum(line.startswith("pid ") for _, line in two.lines) == 2, "nobody was restarted"


def test_one_rank_that_silently_differs_makes_its_whole_group_heal(forge: Forge) -> None:
    with Cluster(forge, STEP_MS=10, FT_NUM_REPLICA_GROUPS=2, PARITY=5) as cluster:
        one = start_group(cluster, "one")
        two = start_group(cluster, "two", CORRUPT_AT="0:7")
        one.wait_step(30)
        cluster.end_at(max(one.step(), two.step()) + 40)
        for group in (one, two):
            assert group.popen.wait(60) == 0, "\n".join(group.errors[-25:])
            group.wait_for(functools.partial(_both_done, group), "printed both digests")
        assert digests(one) == digests(two)
        assert any("differs from the others" in line for line in one.errors)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_sigterm_to_one_rank_drains_its_whole_group(forge: Forge, rank: int) -> None:
    with Cluster(forge, STEP_MS=20, FT_NUM_REPLICA_GROUPS=2) as cluster:
        one, two = start_group(cluster, "one"), start_group(cluster, "two")
        one.wait_step(10)
        os.kill(pids(two)[rank], signal.SIGTERM)
        assert two.popen.wait(60) == 0, "\n".join(two.errors[-25:])
        assert sum("drained at step" in line for line in two.errors) == 2
        one.wait_step(two.step() + 10)
        cluster.end_at(one.step() + 20)
        assert one.popen.wait(60) == 0, "\n".join(one.errors[-25:])
        one.wait_for(functools.partial(_both_done, one), "printed both digests")
        ends = set()
        for group in (one, two):
            assert [line for _, line in group.lines if line.startswith("veto")] == []
            for number in ("0", "1"):
                rows = [line.split() for _, line in group.lines if line.startswith("commit")]
                steps = [int(row[1]) for row in rows if row[4] == number]
                assert steps == list(range(1, steps[-1] + 1)), "a step was lost"
                ends.add((group.name, steps[-1]))
        assert len(ends) == 2  # the ranks of a group end at the same step


def test_sigterm_to_one_rank_of_a_group_that_waits_for_a_quorum(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=2, FT_MIN_REPLICAS=2) as cluster:
        lonely = start_group(cluster, "lonely", TIMEOUT_S=60)
        lonely.wait_for(lambda: sum(line.startswith("ready") for _, line in lonely.lines) == 2, "started both ranks")
        lonely.wait_for(lambda: any("waiting for a quorum" in line for line in lonely.errors), "waited")
        since = time.monotonic()
        os.kill(pids(lonely)[1], signal.SIGTERM)
        assert lonely.popen.wait(30) == 0, "\n".join(lonely.errors[-25:])
        assert time.monotonic() - since < 10.0  # no timeout was waited for
