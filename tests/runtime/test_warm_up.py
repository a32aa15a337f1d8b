"""A newcomer's first step is made outside the quorum, so that what is slow in it holds nobody up."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from ft_core.runtime.random_state import RandomState
from ft_core.runtime.warm_up import is_due
from tests.runtime.harness import CLASSES, FEATURES, Cluster, Replica, sgd

if TYPE_CHECKING:
    from collections.abc import Callable

ENDLESS: dict[str, Any] = {"steps": 10**6, "max_iterations": 10**6}


class Noisy(nn.Module):
    """Draws random numbers and keeps statistics in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        out: Tensor = self.inner(x + 0.01 * torch.randn(()))
        return out


def then_all_end(cluster: Cluster) -> Callable[[Replica], None]:
    """A loop for the newcomer: once it has committed a few steps, all train for a few more and end."""

    def loop(replica: Replica) -> None:
        while len(replica.commits) < 3:
            replica.iteration()
        end = replica.manager.current_step() + 5
        for other in cluster.replicas:
            other.steps = end
        replica.train()

    return loop


def join(cluster: Cluster, late: Replica) -> tuple[Replica, Replica]:
    """Two that train, and `late`, which comes when they have made four steps."""
    first, second = Replica(0, **ENDLESS), Replica(1, **ENDLESS)
    first.actions[4, "boundary"] = lambda _actor: cluster.start(late)
    cluster.run(first, second, expected=2)
    cluster.check()
    assert {r.commits[-1].step for r in cluster.replicas} == {late.steps}
    return first, second


def test_the_others_train_on_while_a_newcomer_is_in_its_first_forward(cluster: Cluster) -> None:
    def slow(_newcomer: Replica) -> None:
        first = cluster.replicas[0]
        begun = len(first.commits)
        cluster.lighthouse.wait_for(lambda: len(first.commits) >= begun + 20)

    late = Replica(2, loop=then_all_end(cluster), at={(0, "forward"): slow}, **ENDLESS)
    first, second = join(cluster, late)
    assert (first.vetoes, second.vetoes) == ([], [])
    assert late.vetoes == [0]  # its warm-up
    assert late.commits[0].step > 20


def test_without_it_they_do_not(cluster: Cluster) -> None:
    """What the test above would show if there were no warm-up."""
    held: list[int] = []

    def slow(_newcomer: Replica) -> None:
        first = cluster.replicas[0]
        begun = len(first.commits)
        with pytest.raises(AssertionError):
            cluster.lighthouse.wait_for(lambda: len(first.commits) >= begun + 20, timeout_s=0.5)
        held.append(len(first.commits) - begun)

    late = Replica(2, loop=then_all_end(cluster), at={(0, "started"): slow}, warm_up=False, **ENDLESS)
    join(cluster, late)
    assert late.vetoes == []
    assert held[0] < 20


def test_what_the_warm_up_drew_and_changed_is_given_back(cluster: Cluster) -> None:
    found: dict[str, Any] = {}

    class Newcomer(Replica):
        def iteration(self) -> None:
            before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            parameters = [p.detach().clone() for p in self.model.parameters()]
            drawn = torch.get_rng_state(), random.getstate()
            super().iteration()
            if not found:
                assert self.manager.warming_up
                assert self.manager.num_participants() == 1
                assert not self.manager.is_participating()
                found["buffers"] = all(torch.equal(b, before[n]) for n, b in self.model.named_buffers())
                found["parameters"] = all(map(torch.equal, self.model.parameters(), parameters))
                found["torch"] = torch.equal(torch.get_rng_state(), drawn[0])
                found["python"] = random.getstate() == drawn[1]

    class Quiet(Replica):
        """Draws nothing: generators are shared by all threads."""

    late = Newcomer(2, build=Noisy, optim=sgd, loop=then_all_end(cluster), **ENDLESS)
    first = Quiet(0, build=QuietNoisy, optim=sgd, **ENDLESS)
    first.actions[4, "boundary"] = lambda _actor: cluster.start(late)
    cluster.run(first, expected=1)
    cluster.check()
    assert found == {"buffers": True, "parameters": True, "torch": True, "python": True}
    assert late.vetoes == [0]


class QuietNoisy(Noisy):
    """The same signature."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_a_start_quorum_without_a_vote_ends_the_warm_up_too(cluster: Cluster) -> None:
    class Skipping(Replica):
        def iteration(self) -> None:
            if self.manager.warming_up or self.commits:
                super().iteration()
            else:
                state = RandomState.take()
                self.optimizer.zero_grad()
                self.loss().backward()
                random.random()
                if self.manager.warming_up:
                    self.optimizer.zero_grad()  # no step for this batch
                    assert not self.manager.warming_up
                    assert random.getstate() == state.python
                    self.loss().backward()
                self.optimizer.step()
                self.record(self.optimizer.committed, participated=True)

    late = Skipping(2, loop=then_all_end(cluster), **ENDLESS)
    join(cluster, late)
    assert late.vetoes == []


def test_when_a_warm_up_is_due() -> None:
    names = ("wanted", "first", "others_train", "wraps_a_model", "divides_data", "has_data")
    for values in itertools.product((False, True), repeat=len(names)):
        facts = dict(zip(names, values, strict=True))
        due = all(value is (name != "divides_data") for name, value in facts.items())
        assert is_due(ranks=1, **facts) is due
        assert not is_due(ranks=2, **facts)
