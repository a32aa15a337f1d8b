"""Networks that fail in part: replicas that cannot reach each other though all reach the lighthouse; a lighthouse that
cannot reach a replica; a proxy in front of the lighthouse that restarts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster, gap_s
from tests.chaos.network import NetworkCluster, available

if TYPE_CHECKING:
    from tests.chaos.cluster import Process
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def _namespaces() -> None:
    why = available()
    if why:
        pytest.skip(why)


def wait_participants(process: Process, number: int) -> None:
    process.wait_for(lambda: any(row[2] == number for row in process.commits()), f"trained with {number} participants")


STEPS_REPORTED = 20
"""Until then the lighthouse knows that there is trained state. A quorum of which it knows none, and of which every
connection has closed, holds nobody up for longer than a liveness timeout and the reconnect time (R1's exception)."""
needs_namespaces = pytest.mark.usefixtures("_namespaces")


def test_a_proxy_before_the_lighthouse_restarts(forge: Forge) -> None:
    """All connections of all members close in the same moment, and who asks meanwhile asks alone."""
    with Cluster(forge, TIMEOUT_S=10, FT_QUORUM_S=120, STEP_MS=10) as cluster:
        proxy = cluster.start_proxy()
        a, b = (cluster.start(name, FT_LIGHTHOUSE=f"127.0.0.1:{cluster.proxy_port}") for name in "ab")
        wait_participants(a, 2)
        a.wait_step(a.step() + STEPS_REPORTED)
        at = time.monotonic()
        proxy.popen.kill()
        c = cluster.start("c")
        c.wait_for(lambda: any(line.startswith("ready") for _, line in c.lines), "was ready to ask")
        a.wait_step(a.step() + 200)  # 10 ms each: longer than the grace, and than a liveness timeout
        assert c.commits() == []
        assert gap_s(a, at) < 2.0
        cluster.start_proxy()
        wait_participants(c, 3)  # who is late for the end would be told that there is nothing left to do
        assert len(cluster.wait_ends()) == 1
        assert {row[2] for row in a.commits()} <= {1, 2, 3}
        assert b.step() == a.step() == c.step()


@needs_namespaces
def test_a_lighthouse_that_cannot_reach_the_members_forms_no_quorum_beside_theirs(forge: Forge) -> None:
    """One way only: what they report arrives; what it answers is lost, so that their leases end."""
    with NetworkCluster(forge, "a", "b", "c", TIMEOUT_S=10, FT_QUORUM_S=120, STEP_MS=10) as cluster:
        a, _b = (cluster.start(name) for name in "ab")
        wait_participants(a, 2)
        a.wait_step(a.step() + STEPS_REPORTED)
        for name in "ab":
            cluster.network.cut("hub", name, both_ways=False)
        c = cluster.start("c")
        c.wait_for(lambda: any(line.startswith("ready") for _, line in c.lines), "was ready to ask")
        a.wait_step(a.step() + 250)
        assert c.commits() == []
        for name in "ab":
            cluster.network.mend("hub", name, both_ways=False)
        wait_participants(c, 3)  # who is late for the end would be told that there is nothing left to do
        assert len(cluster.wait_ends()) == 1


@needs_namespaces
@pytest.mark.long  # with the lost lighthouse above, the simulation's links rule shows it in each run
@pytest.mark.parametrize("both_ways", [pytest.param(True, id="both ways"), pytest.param(False, id="one way")])
def test_two_of_three_that_cannot_reach_each_other(forge: Forge, both_ways: bool) -> None:
    """The third goes on with one of them; the other is told why it waits, and is taken back when the cut is mended."""
    with NetworkCluster(forge, "a", "b", "c", FT_NUM_REPLICA_GROUPS=3, TIMEOUT_S=6, FT_QUORUM_S=120) as cluster:
        a, b, c = (cluster.start(name) for name in "abc")
        for one in (a, b, c):
            wait_participants(one, 3)
        cluster.network.cut("a", "b", both_ways)
        before = c.step()
        c.wait_for(lambda: any(row[1] > before + 50 and row[2] == 2 for row in c.commits()), "trained with one of them")
        on, out = (a, b) if a.step() > b.step() else (b, a)
        assert on.step() > before + 40
        assert out.step() <= before + 10
        cluster.network.mend("a", "b", both_ways)
        out.wait_step(before + 60)
        assert len(cluster.wait_ends()) == 1


@needs_namespaces
@pytest.mark.long
def test_two_that_cannot_reach_each_other(forge: Forge) -> None:
    """One of the two goes on alone."""
    with NetworkCluster(forge, "a", "b", FT_NUM_REPLICA_GROUPS=2, TIMEOUT_S=6, FT_QUORUM_S=120) as cluster:
        a, b = (cluster.start(name) for name in "ab")
        for one in (a, b):
            wait_participants(one, 2)
        before = max(a.step(), b.step())
        cluster.network.cut("a", "b")
        a.wait_for(lambda: max(a.step(), b.step()) > before + 50, "or b trained on alone")
        cluster.network.mend("a", "b")
        for one in (a, b):
            one.wait_step(before + 60)
        assert len(cluster.wait_ends()) == 1
