"""Who shuts down right after a commit leaves that commit behind: its peers may still be receiving the last fence."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core.reduction.interface import FENCE_SLOTS
from tests.runtime.harness import LIMIT_S, PATIENT, PATIENT_S, Cluster, Replica
from tests.runtime.holding import HoldingGroup

if TYPE_CHECKING:
    from collections.abc import Callable

LAST = 3


class Ends(Replica):
    """Makes `LAST` steps whose fence is a reduction of its own, then shuts down as `how` says."""

    how: bool = False
    late: Ends | None = None
    """Whose last fence is held back until this one's shutdown is under way."""
    ending: threading.Event
    ended: threading.Event

    def wrap(self) -> None: ...

    def train(self) -> None:
        while self.manager.current_step() < LAST:
            if self.manager.current_step() == LAST - 1 and isinstance(self.pg, HoldingGroup):
                self.pg.gate.clear()
            self.manager.start_quorum()
            self.record(self.manager.should_commit(), True)
        self.ending.set()
        self.manager.shutdown(wait=self.how)
        self.ended.set()


def ends(index: int, *, wait: bool, gate: threading.Event | None = None) -> Ends:
    replica = Ends(index, pg=None if gate is None else lambda: HoldingGroup(FENCE_SLOTS, gate), **PATIENT)
    replica.how, replica.ending, replica.ended = wait, threading.Event(), threading.Event()
    return replica


@pytest.mark.parametrize("others", [1, 2])
def test_a_peer_that_still_receives_the_last_fence_gets_it(cluster: Cluster, others: int) -> None:
    gate = threading.Event()
    gate.set()
    late = ends(0, wait=False, gate=gate)
    first = [ends(1 + i, wait=False) for i in range(others)]
    cluster.expected = 1 + others
    cluster.start(late, *first)
    for replica in first:
        assert replica.ending.wait(LIMIT_S)
    cluster.lighthouse.wait_for(lambda: sum(" left: " in line for line in cluster.lighthouse.log) == others)
    if others == 1:  # two of them have told each other that they part
        assert not first[0].ended.wait(0.2)
    gate.set()
    cluster.join()
    cluster.check(steps=LAST)
    assert [r.vetoes for r in cluster.replicas] == [[]] * (1 + others)
    assert cluster.lighthouse.asks == 1 + others


@pytest.mark.parametrize("wait", [[False, False], [True, True], [True, False], [True, False, False]])
def test_all_who_end_at_once_end_quickly(cluster: Cluster, wait: list[bool], exit_s: Callable[[float], None]) -> None:
    """They have told each other that they part, and wait for nothing else."""
    exit_s(PATIENT_S)
    replicas = [ends(i, wait=w) for i, w in enumerate(wait)]
    cluster.expected = len(wait)
    cluster.start(*replicas)
    cluster.join()
    cluster.check(steps=LAST)


def test_who_leaves_is_not_held_by_a_peer_in_a_long_forward(cluster: Cluster, exit_s: Callable[[float], None]) -> None:
    exit_s(PATIENT_S)
    gone = threading.Event()

    class Leaves(Replica):
        def train(self) -> None:
            while self.manager.current_step() < 3:
                self.iteration()
            assert forward.wait(LIMIT_S)
            self.manager.shutdown(wait=False)
            gone.set()

    def long(_: Replica) -> None:
        forward.set()
        assert gone.wait(LIMIT_S)

    forward = threading.Event()
    cluster.run(Replica(0, at={(3, "forward"): long}), Leaves(1, **PATIENT))
    cluster.check(steps=6, survivors=1)


class Opens(Replica):
    """Opens a step without a model and shuts down in it, or makes the collective that the other one never makes."""

    leaves = True
    launched: threading.Event

    def wrap(self) -> None: ...

    def train(self) -> None:
        manager = self.manager
        for _ in range(2):
            manager.start_quorum()
            manager.allreduce(torch.ones(1)).wait()
            assert manager.should_commit()
        manager.start_quorum()
        manager.wait_quorum()
        self.committed = None
        if self.leaves:
            assert self.launched.wait(LIMIT_S)
        else:
            work = manager.allreduce(torch.ones(1))
            self.launched.set()
            work.wait()
            self.committed = manager.should_commit()
        manager.shutdown()


@pytest.mark.parametrize("both", [True, False])
def test_a_shutdown_in_an_open_step_waits_for_nobody(
    cluster: Cluster, both: bool, exit_s: Callable[[float], None]
) -> None:
    exit_s(PATIENT_S)
    launched = threading.Event()
    if both:
        launched.set()
    replicas = [Opens(0, **PATIENT), Opens(1, **PATIENT)]
    replicas[1].leaves = both
    for replica in replicas:
        replica.launched = launched
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None, None]
    assert replicas[1].committed is (None if both else False)
