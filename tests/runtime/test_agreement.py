"""Stopping together: whoever asks for it, all replicas end after the same step, and nobody waits for anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.harness import Cluster, Replica, crash

if TYPE_CHECKING:
    from tests.runtime.loopback import Loopback


class Stopper(Replica):
    """Trains until it wants to stop (after `until` steps) or is told to; agrees in a fence that commits nothing."""

    def __init__(self, index: int, until: int = 100, **options: object) -> None:
        super().__init__(index, steps=100, **options)  # type: ignore[arg-type]
        self.until = until

    def train(self) -> None:
        while self.manager.current_step() < self.until and not self.manager.stop_agreed:
            self.iteration()
        self.manager.request_stop()
        while not self.manager.stop_agreed:
            self.at("closing")
            self.manager.start_quorum(shrink_only=True)
            self.manager.report_error(RuntimeError("training ends here"))
            assert not self.manager.should_commit()
        self.manager.leave("finished", finished=True)


def ends(cluster: Cluster) -> set[int]:
    return {r.commits[-1].step for r in cluster.replicas if not r.crashed}


@pytest.mark.parametrize("wish", [(3, 100, 100), (100, 4, 4), (3, 3, 3)])
def test_all_end_after_the_same_step(cluster: Cluster, wish: tuple[int, ...]) -> None:
    cluster.run(*[Stopper(i, until) for i, until in enumerate(wish)])
    cluster.check()
    assert ends(cluster) == {min(wish)}


def test_a_crash_while_they_agree(cluster: Cluster) -> None:
    cluster.run(Stopper(0, 3), Stopper(1), Stopper(2, at={(3, "backward"): crash}))
    cluster.check(errors=True)
    assert ends(cluster) == {3}


def test_who_is_in_the_quorum(cluster: Cluster, lighthouse: Loopback) -> None:
    seen: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = []

    def look(replica: Replica) -> None:
        manager = replica.manager
        seen.append((manager.quorum_id, manager.members, manager.healing_members))

    cluster.run(Replica(0, at={(2, "started"): look}), Replica(1, at={(2, "started"): look}))
    assert seen[0] == seen[1]
    assert [name.split(":")[0] for name in seen[0][1]] == ["r0", "r1"]
    assert [name.split(":")[0] for name in seen[0][2]] == ["r1"]  # at the start all take the state of the first
    assert seen[0][0] > 0
