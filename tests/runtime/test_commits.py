"""Steps over several replicas: what a commit means while nothing, or something ordinary, goes wrong."""

from __future__ import annotations

import pytest

from tests.runtime.harness import Cluster, Replica, soft_error


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("use_async", [True, False])
def test_replicas_with_different_seeds_train_as_one(cluster: Cluster, size: int, use_async: bool) -> None:
    cluster.run(*[Replica(i, use_async_quorum=use_async) for i in range(size)])
    cluster.check(steps=6)
    cluster.check_numbers()
    assert cluster.lighthouse.asks == size  # the quorum is leased: nothing was sent per step


def test_a_soft_error_skips_the_step_for_everybody_and_rebuilds_nothing(cluster: Cluster) -> None:
    replicas = [Replica(0), Replica(1, at={(2, "forward"): soft_error}), Replica(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    cluster.check_numbers()
    assert [r.vetoes for r in replicas] == [[2], [2], [2]]
    assert cluster.lighthouse.asks == 3
