"""Synchronous quorums: state is read and loaded in start_quorum only, whatever happens in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness import PATIENT, Cluster, Replica, both, crash
from tests.runtime.interleavings import once_launched, together, until_broken

if TYPE_CHECKING:
    from ft_core.protocol.types import Ask

POINTS = ["boundary", "started", "forward", "backward", "stepped"]


class BetweenSteps(Replica):
    """Notes every use of its state functions outside start_quorum, and every step whose quorum was lost."""

    def __init__(self, index: int, **options: Any) -> None:
        super().__init__(index, use_async_quorum=False, **options)
        self.opening = False
        self.outside: list[str] = []
        self.lost: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        if not self.opening:
            self.outside.append(f"read in step {self.step}")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.opening:
            self.outside.append(f"loaded in step {self.step}")
        super().load_state_dict(state)

    def iteration(self) -> None:
        self.step = self.manager.current_step()
        self.at("boundary")
        self.opening = True
        self.manager.start_quorum()
        self.opening = False
        self.inner.zero_grad()
        self.at("started")
        loss = self.loss()
        self.at("forward")
        loss.backward()
        participated = self.manager.is_participating()
        self.at("backward")
        committed = self.manager.should_commit()
        self.lost.append(self.manager.quorum_lost)
        if committed:
            self.inner.step()
        self.record(committed, participated)
        self.at("stepped")


@pytest.mark.parametrize("point", POINTS)
def test_a_crash(cluster: Cluster, point: str) -> None:
    survivors = [BetweenSteps(i) for i in range(2)]
    lost = 4 if point in ("backward", "stepped") else 3  # they wait for it there
    cluster.run(*survivors, BetweenSteps(2, at={(3, point): once_launched(survivors, lost, crash)}))
    cluster.check(steps=6, survivors=2)
    assert [r.outside for r in survivors] == [[], []]
    assert [r.vetoes for r in survivors] == [[lost], [lost]]
    assert [r.lost for r in survivors] == [[False] * lost + [True] + [False] * (6 - lost)] * 2


def test_a_newcomer_in_the_quorum_of_a_veto(cluster: Cluster) -> None:
    again = BetweenSteps(2, name="r2", seed=77, steps=10)
    first = BetweenSteps(0, steps=10, at={(4, "forward"): cluster.joins(again)})
    replicas = [first, BetweenSteps(1, steps=10)]
    cluster.run(*replicas, BetweenSteps(2, steps=10, at={(4, "backward"): crash}))
    cluster.check(steps=10, survivors=3)
    assert [r.outside for r in (*replicas, again)] == [[], [], []]


def test_a_newcomer_that_the_others_wait_for(cluster: Cluster) -> None:
    """It copies live state before it asks for the quorum: who waits for it must hand that out meanwhile."""
    again = BetweenSteps(1, name="r1", seed=77, min_replica_size=2)
    first = BetweenSteps(0, min_replica_size=2)
    dying = BetweenSteps(1, min_replica_size=2, at={(3, "forward"): both(lambda _: cluster.start(again), crash)})
    cluster.run(first, dying, expected=2)
    cluster.check(steps=6, survivors=2)


@pytest.mark.parametrize("late", [False, True])
def test_a_newcomer_that_an_attempt_which_moves_would_wait_for(cluster: Cluster, late: bool) -> None:
    """In the middle of a step no live state is handed out, so that attempt is given up (R19).

    `late`: its ask at the next boundary comes after the newcomer's, which its ask from within the step has met.
    """
    lighthouse = cluster.lighthouse

    def asks_late(replica: Replica) -> None:
        control = replica.manager._runtime.shell.control
        send, before = control.ask, replica.manager._runtime.rank.quorum_id
        lighthouse.wait_for(lambda: lighthouse.asking("r0"))  # from within the step: another thread of its sends that

        def late_ask(ask: Ask, room: str | None = None) -> None:
            lighthouse.wait_for(lambda: before < getattr(lighthouse.room.last_quorum, "quorum_id", 0))
            send(ask, room)

        control.ask = late_ask  # type: ignore[method-assign]

    options: dict[str, Any] = {"min_replica_size": 2, **PATIENT}
    again = BetweenSteps(1, name="r1", seed=77, **options)
    met = together(2)  # a death that is seen at the boundary already costs no attempt
    first = BetweenSteps(0, at={(3, "forward"): both(met, until_broken, *([asks_late] if late else []))}, **options)
    dying = BetweenSteps(1, at={(3, "forward"): both(met, lambda _: cluster.start(again), crash)}, **options)
    cluster.run(first, dying, expected=2)
    cluster.check(steps=6, survivors=2)
    assert first.vetoes == [3]
