"""Draining: whoever is asked to end costs the others nothing, wherever it happens to be, and ends soon."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.errors import CollectiveError
from ft_core.protocol.pushes import Order
from tests.runtime.harness import LIMIT_S, PATIENT, PATIENT_S, Cluster, Replica, crash, hang

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.manager import Manager


def drain(replica: Replica) -> None:
    """As the lease thread does when the lighthouse pushes the order."""
    replica.manager._runtime.shell.on_push(Order(kill=False, reason="node goes away"))


class Drained(Replica):
    """What its process ended with is looked at, and is no error."""

    status: object = "did not end by itself"

    def train(self) -> None:
        try:
            super().train()
        except SystemExit as end:
            self.status = end.code


@pytest.mark.parametrize("point", ["boundary", "started", "forward", "backward", "stepped"])
def test_draining_costs_the_others_nothing(cluster: Cluster, point: str, caplog: pytest.LogCaptureFixture) -> None:
    leaver = Drained(2, steps=8, at={(3, point): drain})
    others = [Replica(0, steps=8), Replica(1, steps=8)]
    cluster.run(*others, leaver)
    cluster.check(steps=8, survivors=2)
    cluster.check_numbers()
    assert leaver.status == 0
    assert [r.vetoes for r in cluster.replicas] == [[], [], []]
    assert [c.step for c in leaver.commits] == [1, 2, 3] if point == "boundary" else [1, 2, 3, 4]
    assert not cluster.lighthouse.room.closed
    assert any("left: drained: node goes away" in line for line in cluster.lighthouse.log)
    said = [r.getMessage() for r in caplog.records if "drained at step" in r.getMessage()]
    assert len(said) == 1
    assert "node goes away" in said[0]


def test_collectives_of_the_script_before_training_change_nothing(cluster: Cluster) -> None:
    """As Lightning's, which agrees on a folder for logs first: the last fence of whoever drains counts all the same."""

    def once(replica: Replica) -> None:
        replica.manager.start_quorum()
        replica.manager.allreduce(torch.ones(1)).wait()

    replicas = [Drained(i, steps=8, at={(0, "boundary"): once}) for i in range(3)]
    replicas[2].actions[3, "boundary"] = drain
    cluster.run(*replicas)
    cluster.check(steps=8, survivors=2)
    assert [r.vetoes for r in cluster.replicas] == [[], [], []]
    assert [c.step for c in replicas[2].commits] == [1, 2, 3]


def test_all_drain_one_after_another_or_together(cluster: Cluster) -> None:
    replicas: list[Replica] = [Drained(i, steps=9, at={(3 + i // 2, "forward"): drain}) for i in range(4)]
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 4
    assert [getattr(r, "status", None) for r in replicas] == [0] * 4
    assert [r.vetoes for r in replicas] == [[]] * 4
    cluster.check(survivors=0)


def test_without_exit_only_the_reason_is_set(cluster: Cluster) -> None:
    class Decides(Replica):
        def train(self) -> None:
            while not self.manager.drain_reason:
                self.iteration()
            self.manager.leave(f"drained: {self.manager.drain_reason}")

    leaver = Decides(2, steps=8, at={(3, "forward"): drain}, exit_on_drain=False)
    others = [Replica(0, steps=8), Replica(1, steps=8)]
    cluster.run(*others, leaver)
    cluster.check(steps=8, survivors=2)
    assert [r.vetoes for r in cluster.replicas] == [[], [], []]
    assert leaver.commits[-1].step == 4


def ends(replica: Drained) -> None:
    replica.join()
    assert replica.error is None
    assert replica.status == 0


def test_draining_before_anything_was_asked(cluster: Cluster, exit_s: Callable[[float], None]) -> None:
    exit_s(PATIENT_S)
    alone = Drained(0, min_replica_size=2, at={(0, "boundary"): drain}, **PATIENT)
    cluster.start(alone)
    ends(alone)
    assert cluster.lighthouse.asks == 0


def test_draining_while_waiting_for_the_first_quorum(cluster: Cluster, exit_s: Callable[[float], None]) -> None:
    exit_s(PATIENT_S)
    alone = Drained(0, min_replica_size=2, **PATIENT)
    cluster.start(alone)
    cluster.lighthouse.wait_for(lambda: cluster.lighthouse.asking("r0"))
    drain(alone)
    ends(alone)


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_draining_while_waiting_for_another_quorum(
    cluster: Cluster, use_async_quorum: bool, exit_s: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its peer has died and min_replicas does not let it go on alone: nobody takes its last step within EXIT_S."""
    exit_s(0.2)
    two = Drained(0, min_replica_size=2, use_async_quorum=use_async_quorum)
    cluster.start(two, Replica(1, min_replica_size=2, at={(3, "forward"): crash}))
    cluster.lighthouse.wait_for(lambda: len(two.commits) == 3 and cluster.lighthouse.asking("r0"))
    with caplog.at_level("INFO", logger="ft_core"):
        drain(two)
        ends(two)
    (told,) = [r.getMessage() for r in caplog.records if "which nobody took" in r.getMessage()]
    assert "leaves with step 3, which nobody took: no quorum within 0.2 s" in told


def test_draining_when_the_quorum_breaks(cluster: Cluster) -> None:
    leaver = Drained(0, steps=8, at={(3, "backward"): drain})
    cluster.run(leaver, Replica(1, steps=8, at={(3, "backward"): crash}), Replica(2, steps=8))
    assert leaver.error is None
    assert leaver.status == 0
    cluster.check(steps=8, survivors=1)


def test_whoever_drains_hands_over_a_commit_that_the_other_has_not_seen(cluster: Cluster) -> None:
    """Its fence has completed, and the other's ended with a connection: without that step 4 would be made twice."""
    leaver = Drained(0, steps=8, at={(3, "backward"): drain})

    def misses_it(replica: Replica) -> None:
        cluster.lighthouse.wait_for(lambda: len(leaver.commits) == 4)
        replica.manager._runtime.shell.fail(CollectiveError("connection reset by peer"))

    other = Replica(1, steps=8, at={(3, "backward"): misses_it})
    cluster.run(leaver, other)
    assert leaver.status == 0
    cluster.check(steps=8, survivors=1)
    assert [c.step for c in other.commits] == [1, 2, 3, 5, 6, 7, 8]


def test_draining_while_it_heals(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor is slow; nobody waits for what is not needed any more."""
    receiving = threading.Event()
    newcomer = Drained(2, steps=12)

    def slow(manager: Manager) -> None:
        healing = manager._runtime.shell.transfer

        def receive(plan: Any, place: Any, into: Any, cancel: threading.Event) -> Any:
            from ft_core.errors import HealError

            receiving.set()
            assert cancel.wait(LIMIT_S)
            raise HealError("cancelled")

        monkeypatch.setattr(healing, "receive", receive)

    make = newcomer.make_manager

    def made() -> Manager:
        manager = make()
        slow(manager)
        return manager

    monkeypatch.setattr(newcomer, "make_manager", made)

    others = [Replica(0, steps=12), Replica(1, steps=12)]
    others[0].actions[4, "boundary"] = cluster.joins(newcomer)
    cluster.expected = 2
    cluster.start(*others)
    assert receiving.wait(20)
    drain(newcomer)
    cluster.join()
    ends(newcomer)
    cluster.check(steps=12, survivors=2)
    assert [r.vetoes for r in others] == [[], []]


def test_a_replica_that_hangs_in_its_step_drains_when_it_is_back(cluster: Cluster) -> None:
    leaver = Drained(1, steps=6, at={(2, "forward"): hang})
    other = Replica(0, steps=6)
    cluster.expected = 2
    cluster.start(leaver, other)
    cluster.lighthouse.wait_for(lambda: len(leaver.commits) == 2)
    drain(leaver)
    leaver.gate.set()
    cluster.join()
    cluster.check(steps=6, survivors=1)
    assert leaver.status == 0
    assert [r.vetoes for r in cluster.replicas] == [[], []]
