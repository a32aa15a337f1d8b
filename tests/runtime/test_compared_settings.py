"""Settings that have to be equal on all replicas: whoever differs is told both values and never trains with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_core import ProcessGroupGloo
from ft_core.errors import RefusedError
from ft_core.manager import WorldSizeMode
from ft_core.process_group import ErrorSwallowingProcessGroupWrapper
from tests.runtime.harness import Cluster, Replica


class Bare(Replica):
    """Reduces one tensor by hand: no model is wrapped, so no signature is known."""

    def wrap(self) -> None:
        self.total = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.copy_(state["total"])

    def iteration(self) -> None:
        self.step = self.manager.current_step()
        self.at("boundary")
        self.manager.start_quorum()
        gradient = torch.full((4,), 1.0 + self.index)
        self.manager.allreduce(gradient).wait()
        if self.manager.should_commit():
            self.total -= gradient
        self.at("stepped")


FIXED = WorldSizeMode.FIXED_WITH_SPARES
OTHER: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"world_size_mode": FIXED}, "world_size_mode=FIXED_WITH_SPARES", "world_size_mode=DYNAMIC"),
    (
        {"world_size_mode": FIXED}, {"world_size_mode": FIXED, "min_replica_size": 2}, "min_replica_size=2",
        "min_replica_size=1",
    ),
    ({"fence": "cpu"}, {}, "fence=bucket", "fence=cpu"),
    ({"parity_check_every": 2}, {}, "parity_check_every=0", "parity_check_every=2"),
    ({"parity_sample_steps": 0}, {}, "parity_sample_steps=1000", "parity_sample_steps=0"),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs", "here", "there"), OTHER, ids=lambda value: str(value)[:40])
def test_who_differs_is_refused_with_both_values(
    cluster: Cluster, ours: dict[str, Any], theirs: dict[str, Any], here: str, there: str
) -> None:
    late = Bare(1, **theirs)
    first = Bare(0, at={(2, "boundary"): cluster.joins(late)}, **ours)
    cluster.run(first, expected=0)
    assert isinstance(late.error, RefusedError), late
    name = here.partition("=")[0]
    assert f"runs with {here}, and r0:" in str(late.error)
    assert str(late.error).endswith(f"with {there}: give all replica groups the same {name}")
    assert first.error is None
    assert first.manager.current_step() == first.steps, "who was there trains on"


def test_a_replica_without_a_wrapped_model_is_told_that_the_others_have_one(cluster: Cluster) -> None:
    late = Bare(1)
    cluster.run(Replica(0, at={(2, "boundary"): cluster.joins(late)}), expected=0)
    assert isinstance(late.error, RefusedError)
    assert "runs with number of models in DistributedDataParallel=0, and r0:" in str(late.error)


def test_what_only_bounds_the_quorum_or_concerns_one_replica_may_differ(cluster: Cluster) -> None:
    """A wrapper around the group is not another kind of group."""
    other = Bare(
        1, min_replica_size=2, use_async_quorum=False, init_sync=True, max_retries=7, on_exhausted="stop_all",
        pg=lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(hostname="127.0.0.1")),
    )  # fmt: skip
    cluster.run(Bare(0), other)
    assert [r.error for r in cluster.replicas] == [None, None]
    assert torch.equal(cluster.replicas[0].total, other.total)  # type: ignore[attr-defined]
