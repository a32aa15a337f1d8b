"""Replicas that know of two lighthouses, when the one that they hold their leases with is killed."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.witness import robust_mutex
from tests.chaos.cluster import WAIT_S, Cluster, Process
from tests.chaos.test_death_notice import another_thread, check_it_goes_on
from tests.launch.lingering import linger

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class Two(Cluster):
    """A cluster with a pair of lighthouses, of which the first serves."""

    lighthouses = 2

    def __init__(self, forge: Forge, **env: object) -> None:
        super().__init__(forge, **env)
        self.second_port = self.ports[1]
        self.env["FT_LIGHTHOUSE"] = f"{self.host}:{self.port},{self.host}:{self.second_port}"

    def __enter__(self) -> Two:
        super().__enter__()
        first = self.lighthouse
        assert first is not None
        first.wait_for(lambda: any("serves now" in line for line in first.errors), "serves, alone")
        self.second = self.lighthouse_at(self.second_port, "second", "--peer", f"{self.host}:{self.port}")
        self.second.wait_for(lambda: any("stands by" in line for line in self.second.errors), "stands by")
        return self

    def start_lighthouse(self) -> None:
        """The first one."""
        peer = f"{self.host}:{self.ports[1]}"
        self.lighthouse = self.lighthouse_at(self.port, "lighthouse", "--peer", peer)

    def fail_over(self, *trainers: Process) -> None:
        """Kill the first lighthouse, and wait until the trainers hold their leases with the second."""
        assert self.lighthouse is not None
        self.lighthouse.signal(signal.SIGKILL)
        self.lighthouse.popen.wait(WAIT_S)
        for one in trainers:
            one.wait_for(
                lambda one=one: any(f":{self.second_port} answers after" in line for line in one.errors),  # type: ignore[misc]
                "said that the second lighthouse answers",
            )


def test_training_goes_on_and_a_newcomer_joins_at_the_second(forge: Forge) -> None:
    with Two(forge, FT_NUM_REPLICA_GROUPS=2, LOG=1) as cluster:
        a, b = cluster.start("a"), cluster.start("b")
        a.wait_step(a.step() + 30)
        cluster.fail_over(a, b)
        cluster.kill("b")
        a.wait_step(a.step() + 30)
        cluster.start("b").wait_step(a.step())
        assert len(cluster.wait_ends()) == 1


@pytest.mark.skipif(not robust_mutex.SUPPORTED, reason="no robust mutexes here")
def test_the_second_lighthouse_learns_of_a_death_before_the_dead_one_is_gone(forge: Forge) -> None:
    """The connection that was opened when the first one ended is among those that the witness ends."""
    with Two(forge, FT_NUM_REPLICA_GROUPS=3, LOG=1) as cluster:
        a, b = cluster.start("a"), cluster.start("b")
        c = cluster.start("c", TRACED=1)
        c.wait_step(1)
        a.wait_step(a.step() + 50)
        cluster.fail_over(a, b, c)
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
