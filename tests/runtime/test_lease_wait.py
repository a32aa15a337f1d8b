"""A lighthouse that is away for longer than autonomy_s: the members wait for it at a boundary, and lose one attempt."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from ft_core.protocol.pushes import Refusal
from tests.runtime.harness import LIMIT_S, Cluster, Replica

if TYPE_CHECKING:
    from tests.runtime.loopback import LoopbackControl

TIMES = {"autonomy_s": 0.3, "orphan_s": 100.0}
WAITS = "training waits for the lighthouse"


def lease(*replicas: Replica, gone: bool) -> None:
    for replica in replicas:
        control = cast("LoopbackControl", replica.manager._runtime.shell.control)
        control.no_lease_since = time.monotonic() if gone else None


def waiting(*replicas: Replica) -> bool:
    ranks = [r.manager._runtime.rank for r in replicas]
    return all(WAITS in rank.reason and rank.attempt.awaits_lease for rank in ranks)


class Outage:
    """From step 2 on nobody has a lease; `then` runs when all wait for one."""

    def __init__(self, cluster: Cluster, *replicas: Replica) -> None:
        self.cluster, self.replicas = cluster, replicas
        past = threading.Event()
        replicas[0].actions[2, "boundary"] = lambda _: lease(*replicas, gone=True)
        for replica in replicas:
            replica.actions[4, "forward"] = lambda _: past.wait(0.4)

    def until_all_wait(self) -> None:
        cluster = self.cluster
        cluster.expected = len(self.replicas)
        cluster.start(*self.replicas)
        cluster.lighthouse.wait_for(
            lambda: all(hasattr(r, "manager") for r in self.replicas) and waiting(*self.replicas)
        )


def two(**options: Any) -> list[Replica]:
    return [Replica(i, steps=8, time_overrides=TIMES, **options) for i in range(2)]


@pytest.mark.parametrize("back", [[0], [1], [0, 1]])
def test_one_attempt_is_lost_however_long_it_lasts(
    cluster: Cluster, back: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    replicas = two()
    outage = Outage(cluster, *replicas)
    outage.until_all_wait()
    lost = [list(r.vetoes) for r in replicas]
    assert not threading.Event().wait(1.0)
    assert waiting(*replicas)
    iterations = [r.iterations for r in replicas]
    lease(*[replicas[i] for i in back], gone=False)  # one of them is enough for both
    cluster.join()
    cluster.check(steps=8)
    assert [r.vetoes for r in replicas] == lost == [[4], [4]]
    assert iterations == [6, 6]
    assert cluster.lighthouse.asks == 2
    assert sum(WAITS in record.getMessage() for record in caplog.records) == 2  # once each


def test_a_replica_that_drains_meanwhile_holds_nobody(cluster: Cluster) -> None:
    replicas = two()
    Outage(cluster, *replicas).until_all_wait()
    started = time.monotonic()
    replicas[1].manager._runtime.shell.drain("pre-empted")
    replicas[1].thread.join(LIMIT_S)
    assert isinstance(replicas[1].error, SystemExit)
    assert time.monotonic() - started < 4.0
    lease(replicas[0], gone=False)
    cluster.join()
    assert replicas[0].error is None
    assert [c.step for c in replicas[0].commits] == list(range(1, 9))


def test_a_shutdown_ends_the_wait(cluster: Cluster) -> None:
    replicas = two()
    Outage(cluster, *replicas).until_all_wait()
    started = time.monotonic()
    for replica in replicas:
        replica.manager.shutdown()
    cluster.join()
    assert time.monotonic() - started < 8.0


def test_a_replica_that_dies_meanwhile_is_noticed(cluster: Cluster) -> None:
    replicas = two()
    Outage(cluster, *replicas).until_all_wait()
    replicas[1].crashed = True
    replicas[1].die()
    lease(replicas[0], gone=False)
    replicas[0].thread.join(LIMIT_S)
    assert replicas[0].error is None
    assert [c.step for c in replicas[0].commits] == list(range(1, 9))
    replicas[1].manager._runtime.shell.on_push(Refusal(RuntimeError("ended by the test")))
    cluster.join()
