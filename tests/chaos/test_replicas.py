"""Replicas that are killed, frozen and restarted while the others train; a lighthouse that dies."""

from __future__ import annotations

import itertools
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster, gap_s

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
NAMES = ("a", "b", "c")


def test_a_killed_replica_is_lost_and_taken_back(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3, BN=1) as cluster:
        a, b, _ = (cluster.start(name) for name in NAMES)
        a.wait_step(10)
        cluster.kill("c")
        before = a.step()
        a.wait_step(before + 20)
        back = cluster.start("c")
        back.wait_step(1)
        assert back.commits()[0][2] == 3  # it contributes from its first step on
        assert len(cluster.wait_ends()) == 1
        assert {row[2] for row in a.commits()} == {2, 3}
        assert b.step() == a.step()


def test_a_replica_that_is_asked_to_end_costs_the_others_nothing(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3) as cluster:
        a, b, c = (cluster.start(name) for name in NAMES)
        a.wait_step(10)
        cluster.drain("c")
        assert any("drained at step" in line for line in c.errors)
        a.wait_step(c.step() + 30)
        assert len(cluster.wait_ends()) == 1
        for survivor in (a, b):
            steps = [row[1] for row in survivor.commits()]
            assert steps == list(range(1, steps[-1] + 1)), "a step was lost"
            assert [line for _, line in survivor.lines if line.startswith("veto")] == []
        assert {row[2] for row in a.commits()} == {2, 3}


def test_a_death_hidden_by_a_forked_child_is_found_at_once(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3) as cluster:
        a, _b, _c = (cluster.start(name, **({"FORK": 1} if name == "c" else {})) for name in NAMES)
        a.wait_step(10)
        at = time.monotonic()
        cluster.kill("c")
        assert len(cluster.wait_ends()) == 1
        assert gap_s(a, at) < 2.0  # not until the child ends, nor until a collective times out


def test_a_frozen_replica_is_left_out_and_heals_when_it_thaws(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3) as cluster:
        a, _b, c = (cluster.start(name) for name in NAMES)
        a.wait_step(10)
        at = time.monotonic()
        c.signal(signal.SIGSTOP)
        a.wait_step(a.step() + 60)
        assert gap_s(a, at) < 2.5  # liveness is 1 s
        c.signal(signal.SIGCONT)
        assert len(cluster.wait_ends()) == 1
        steps = [row[1] for row in c.commits()]
        healed = [b for a, b in itertools.pairwise(steps) if b != a + 1]
        assert len(healed) == 1, f"the frozen replica should jump once, over the steps it slept through: {healed}"


def test_the_lighthouse_may_die(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3) as cluster:
        a, _b, _c = (cluster.start(name) for name in NAMES)
        a.wait_step(10)
        assert cluster.lighthouse is not None
        cluster.lighthouse.signal(signal.SIGKILL)
        cluster.lighthouse.popen.wait()
        a.wait_step(a.step() + 60)  # nobody misses it
        cluster.start_lighthouse()
        a.wait_step(a.step() + 30)
        cluster.kill("c")  # and membership changes work again
        a.wait_step(a.step() + 20)
        assert a.commits()[-1][2] == 2
        cluster.start("c").wait_step(1)
        assert len(cluster.wait_ends()) == 1


def test_a_replica_that_hangs_is_left_out(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=2, TIMEOUT_S=4) as cluster:
        a = cluster.start("a")
        b = cluster.start("b", HANG_AT=30)
        a.wait_step(60)
        assert b.popen.poll() is None
        assert b.step() == 30


def test_a_death_during_a_collective_of_the_users_own(forge: Forge) -> None:
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3, METRIC=1) as cluster:
        a, _b = cluster.start("a"), cluster.start("b")
        c = cluster.start("c", SILENT_AT=20)
        c.wait_for(lambda: any(line == "silent" for _, line in c.lines), "fell silent")
        at = time.monotonic()
        cluster.kill("c")
        a.wait_step(10)
        assert gap_s(a, at) < 3.0
        assert len(cluster.wait_ends()) == 1
