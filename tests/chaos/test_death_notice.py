"""The others go on while the process that was killed is still there, as one is that holds much memory."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.witness import robust_mutex
from tests.chaos.cluster import WAIT_S, Cluster, Process
from tests.chaos.test_groups import pids, start_group
from tests.launch.lingering import linger

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [
    pytest.mark.process, pytest.mark.timeout(120),
    pytest.mark.skipif(not robust_mutex.SUPPORTED, reason="no robust mutexes here"),
]  # fmt: skip


SOON_S = 0.9
"""Less than the liveness timeout of the lighthouse, after which a silent process is given up, notice or not."""


def check_it_goes_on(survivor: Process, after: float, participants: int) -> None:
    """It commits with so many participants within SOON_S after `after`."""

    def found() -> list[float]:
        return [at for at, _, count, _ in survivor.commits() if at > after and count == participants]

    survivor.wait_for(lambda: bool(found()), f"committed with {participants}")
    assert found()[0] - after < SOON_S


def another_thread(pid: int) -> int:
    """Not the one that trains, which is the main one."""
    return next(int(task) for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid)


@pytest.mark.parametrize(
    "fork", [pytest.param({}, marks=pytest.mark.long), {"FORK": 1}], ids=["alone", "with a forked child"]
)
def test_the_others_go_on_while_the_dead_one_is_still_there(forge: Forge, fork: dict[str, int]) -> None:
    """Its connections stay open for as long as the tracer holds one of its threads."""
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=3) as cluster:
        a, b = cluster.start("a"), cluster.start("b")
        c = cluster.start("c", TRACED=1, **fork)
        c.wait_step(1)
        a.wait_step(a.step() + 50)
        with linger(another_thread(c.popen.pid)):
            at = time.monotonic()
            c.signal(signal.SIGKILL)
            for survivor in (a, b):
                check_it_goes_on(survivor, at, 2)
            assert c.popen.poll() is None
        c.popen.wait(WAIT_S)
        del cluster.trainers["c"]
        assert len(cluster.wait_ends()) == 1


def test_a_rank_of_a_group_ends_its_group_as_fast(forge: Forge) -> None:
    """The other group goes on alone while the rank is still there: the dead one's group has left the quorum."""
    with Cluster(forge, FT_NUM_REPLICA_GROUPS=2) as cluster:
        a, b = start_group(cluster, "a"), start_group(cluster, "b", TRACED=1)
        b.wait_step(1)
        a.wait_step(a.step() + 30)
        victim = pids(b)[1]
        with linger(another_thread(victim)):
            at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            check_it_goes_on(a, at, 1)
        b.wait_step(b.step() + 1)  # torchrun has started it again
