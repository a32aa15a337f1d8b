"""What is waited for has the limit that its caller was told, and is waited for once."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from ft_core.errors import QuorumTimeoutError
from tests.runtime.harness import LIMIT_S, Cluster, Replica, crash


class Votes(Replica):
    """Alone in its step: the other one never comes to it."""

    over: threading.Event

    def wrap(self) -> None: ...

    def train(self) -> None:
        manager = self.manager
        manager.start_quorum()
        manager.wait_quorum()
        self.took_s, self.committed = 0.0, None
        if self.index == 0:
            started = time.monotonic()
            if self.with_works:
                manager.allreduce(torch.ones(1))
            self.committed = manager.should_commit(timeout=timedelta(seconds=0.5))
            self.took_s = time.monotonic() - started
            self.over.set()
        else:
            assert self.over.wait(LIMIT_S)

    with_works = False


@pytest.mark.parametrize("with_works", [False, True])
def test_should_commit_keeps_its_timeout_in_a_group_of_one_rank(cluster: Cluster, with_works: bool) -> None:
    over = threading.Event()
    replicas = [Votes(i) for i in range(2)]
    for replica in replicas:
        replica.over, replica.with_works = over, with_works
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None, None]
    assert replicas[0].committed is False
    assert replicas[0].took_s < 3.0  # the Manager's timeout is 10


def test_a_quorum_timeout_is_waited_for_once(cluster: Cluster) -> None:
    """The survivor may not go on alone: it asks in start_quorum, and should_commit raises what became of that."""
    raised = threading.Event()

    def told(replica: Replica) -> None:
        started = time.monotonic()
        try:
            while True:
                replica.iteration()
        except QuorumTimeoutError:
            replica.caught_after_s = time.monotonic() - started  # type: ignore[attr-defined]
            replica.steps = 0
            raised.set()

    options = {"min_replica_size": 2, "quorum_timeout": timedelta(seconds=2)}
    survivor = Replica(0, at={(3, "boundary"): told}, **options)  # type: ignore[arg-type]
    cluster.run(survivor, Replica(1, at={(3, "backward"): crash}, **options))  # type: ignore[arg-type]
    assert raised.is_set()
    assert survivor.caught_after_s < 3.5, survivor.caught_after_s  # type: ignore[attr-defined]


def test_a_round_keeps_no_state_once_its_quorum_stands(cluster: Cluster) -> None:
    kept = []

    def look(replica: Replica) -> None:
        shell = replica.manager._runtime.shell
        kept.append((shell._view, shell._in_place, shell.received, shell.transfer._prefetched))

    late = Replica(2, steps=8)
    donor = Replica(0, steps=8, at={(2, "boundary"): cluster.joins(late), (7, "boundary"): look})
    late.actions[7, "boundary"] = look
    cluster.run(donor, Replica(1, steps=8))
    cluster.check(steps=8)
    assert kept == [(None, None, None, None)] * 2
