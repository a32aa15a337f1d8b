"""A Manager over a group of devices, with NCCL pretended: the ballots travel beside the gradients, over Gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed import ReduceOp

from ft_core.errors import ConfigError
from ft_core.process_group import ManagedProcessGroup
from tests.process_group.fake_communicator import FakeNCCL
from tests.process_group.ranks import nothing_is_left, set_aside_lost_groups
from tests.runtime.harness import Cluster, Replica, crash

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _groups_that_earlier_files_broke_are_set_aside() -> None:
    """Gloo ends some of them at their timeout only."""
    set_aside_lost_groups()


@pytest.fixture(autouse=True)
def _all_groups_are_released() -> Iterator[None]:
    yield
    assert nothing_is_left(10.0)


class Pretended(FakeNCCL):
    """Its tensors lie in CPU memory, which a group that torch calls nccl is not given."""

    @property
    def torch_backend(self) -> str:
        return "pretended"


def nccl() -> FakeNCCL:
    return Pretended(timedelta(seconds=10))


def test_replicas_train_as_they_do_over_gloo(cluster: Cluster) -> None:
    replicas = [Replica(index, pg=nccl) for index in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    cluster.check_numbers()
    assert [replica.vetoes for replica in replicas] == [[], []]
    launches = [replica.pg.behaviour.calls.count("launch") for replica in replicas if isinstance(replica.pg, FakeNCCL)]
    assert min(launches) >= 6  # the gradients went over it


def test_a_tensor_on_another_device_is_refused_at_the_call_and_costs_no_step(cluster: Cluster) -> None:
    """Before anything is launched, be it of the same call: who raises would leave the others in a collective."""
    launched: list[int] = []

    def refused(replica: Replica) -> None:
        manager, away, here = replica.manager, torch.ones(2, device="meta"), torch.ones(2)
        launches = replica.pg.behaviour.calls.count("launch") if isinstance(replica.pg, FakeNCCL) else -1
        for operation in (ReduceOp.AVG, ReduceOp.SUM):
            with pytest.raises(ConfigError, match=r"allreduce over Pretended takes tensors on cpu, .* on meta"):
                manager.allreduce(away, reduce_op=operation)
        with pytest.raises(ConfigError, match=r"allreduce_coalesced over Pretended takes tensors on cpu, .* on meta"):
            ManagedProcessGroup(manager).allreduce_coalesced([here, away])
        assert torch.equal(here, torch.ones(2))
        assert manager.errored() is None
        assert isinstance(replica.pg, FakeNCCL)
        launched.append(replica.pg.behaviour.calls.count("launch") - launches)

    replicas = [Replica(index, pg=nccl, at={(2, "forward"): refused}) for index in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [replica.vetoes for replica in replicas] == [[], []]
    assert launched == [0, 0]


@pytest.mark.parametrize("point", ["boundary", "forward", "backward"])
def test_survivors_of_a_crash_go_on(cluster: Cluster, point: str) -> None:
    survivors = [Replica(index, pg=nccl) for index in range(2)]
    cluster.run(*survivors, Replica(2, pg=nccl, at={(3, point): crash}))
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers()
    assert all(len(replica.vetoes) <= 2 for replica in survivors)


def test_the_survivor_of_a_pair_goes_on_without_the_library(cluster: Cluster) -> None:
    """A group of one needs none: no second communicator is made."""
    survivor = Replica(0, pg=nccl)
    cluster.run(survivor, Replica(1, pg=nccl, at={(3, "backward"): crash}))
    cluster.check(steps=6, survivors=1)
    cluster.check_numbers()
    assert isinstance(survivor.pg, FakeNCCL)
    assert len(survivor.pg.communicators) == 1
    assert survivor.pg.size() == 0  # shut down, and nothing is left of either


def test_a_restarted_replica_heals_and_ends_equal(cluster: Cluster) -> None:
    again = Replica(1, name="r1", seed=77, steps=10, pg=nccl)
    first = Replica(0, steps=10, pg=nccl, at={(5, "boundary"): cluster.joins(again)})
    cluster.run(first, Replica(1, steps=10, pg=nccl, at={(3, "backward"): crash}))
    cluster.check(steps=10, survivors=2)
    cluster.check_numbers()
    assert again.commits[0].step > 5
