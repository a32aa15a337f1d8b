"""A script that has shut its Manager down and drops it keeps nothing of it: no process group, no reducer, no model.

Autograd keeps the hooks of parameters where no garbage collection sees them, so one that knows the Manager would keep
all of it, and Gloo's threads with it.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core import OptimizerWrapper, PureDistributedDataParallel
from tests.runtime.harness import Cluster, Replica, batch_of, sgd, with_batch_norm

if TYPE_CHECKING:
    from collections.abc import Callable


class Pure(Replica):
    """Trains with the simple wrapper."""

    def wrap(self) -> None:
        self.ddp = PureDistributedDataParallel(self.manager, self.model)
        self.optimizer = OptimizerWrapper(self.manager, self.inner)


def held_by(replica: Replica) -> dict[str, weakref.ref[object]]:
    """What must go when the replica goes."""
    runtime = replica.manager._runtime
    held = {"runtime": runtime, "model": replica.model, "gradients": replica.pg}
    held |= {"control": runtime.shell.communicators.control, "shell": runtime.shell}
    held |= {f"reducer {index}": reducer for index, reducer in enumerate(runtime.reducers)}
    return {name: weakref.ref(one) for name, one in held.items()}


@pytest.mark.parametrize(
    "build", [Replica, Pure, lambda index: Replica(index, build=with_batch_norm)], ids=["ddp", "pure", "buffers"]
)
def test_nothing_stays(cluster: Cluster, build: Callable[[int], Replica]) -> None:
    cluster.run(build(0), build(1))
    cluster.check(steps=6)
    held = [held_by(replica) for replica in cluster.replicas]
    cluster.replicas.clear()
    cluster.lighthouse.stop()
    gc.collect()
    assert [[name for name, one in of.items() if one() is not None] for of in held] == [[], []]


def test_a_model_outlives_its_manager_and_trains_alone(cluster: Cluster) -> None:
    """Its gradients are its own again, whatever the wrapper that is left around it does."""
    cluster.run(Replica(0, optim=sgd), Replica(1, optim=sgd))
    cluster.check(steps=6)
    replica = cluster.replicas[0]
    x, y = batch_of(0, 0)
    parameters = list(replica.model.parameters())
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(replica.model(x), y), parameters)
    for parameter in parameters:
        parameter.grad = None
    torch.nn.functional.cross_entropy(replica.ddp(x), y).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, expected, strict=True))  # type: ignore[arg-type]
