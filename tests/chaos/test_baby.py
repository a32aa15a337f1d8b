"""Training whose process groups run in child processes, when a trainer is killed, and when a child alone is."""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster, Process, gap_s
from tests.process_group.ranks import wait_until

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def child_of(trainer: Process) -> int:
    with trainer.changed:
        return [int(line.split()[1]) for _, line in trainer.lines if line.startswith("child ")][-1]


def vetoes(trainer: Process) -> int:
    with trainer.changed:
        return sum(line.startswith("veto ") for _, line in trainer.lines)


def test_a_killed_trainer_is_lost_at_once_and_taken_back(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=2, GROUP="ProcessGroupBabyGloo") as cluster:
        a, b = cluster.start("a"), cluster.start("b")
        a.wait_step(10)
        child, at = child_of(b), time.monotonic()
        cluster.kill("b")
        a.wait_step(a.step() + 20)
        assert gap_s(a, at) < 3.0  # not until a collective times out (20 s)
        assert a.commits()[-1][2] == 1
        assert wait_until(lambda: not pathlib.Path(f"/proc/{child}").exists())
        back = cluster.start("b")
        back.wait_step(1)
        assert len(cluster.wait_ends()) == 1
        assert a.commits()[-1][2] == 2


def test_a_killed_child_costs_one_step_at_most(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=2, GROUP="ProcessGroupBabyGloo") as cluster:
        a, b = cluster.start("a"), cluster.start("b")
        b.wait_step(10)
        child, at = child_of(b), time.monotonic()
        os.kill(child, signal.SIGKILL)
        b.wait_for(lambda: child_of(b) != child, "went on in another child")
        a.wait_step(b.step() + 20)
        assert gap_s(b, at) < 3.0
        assert len(cluster.wait_ends()) == 1
        for trainer in (a, b):
            steps = [row[1] for row in trainer.commits()]
            assert steps == [step for step, _ in itertools.groupby(steps)]
            assert vetoes(trainer) <= 1
            assert {row[2] for row in trainer.commits()[-20:]} == {2}
