"""Replicas that silently differ are found by what each fence says of a part of their parameters. Real Managers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ft_core.runtime.parity_check import TIRED_AFTER
from ft_core.runtime.state_sample import StateSample, _windows
from tests.runtime.harness import Cluster, Replica, digest_of


def drift(replica: Replica) -> None:
    """Change one parameter of this replica only, in its last bits."""
    with torch.no_grad():
        list(replica.model.parameters())[-1].view(-1)[-1] += 1e-6


# ------------------------------------------------------------ the sample


def big(numel: int = 40_000) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(numel), torch.randn(3, 5), torch.empty(0), torch.randn(8, 4, 3, 3).to(
        memory_format=torch.channels_last
    ), torch.randn(777).to(torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 7, 40, 1000])
def test_every_byte_is_looked_at_within_one_pass(steps: int) -> None:
    parameters = big()
    sample = StateSample(parameters, steps)

    def digests() -> list[int | None]:
        return [sample.take(step) for step in range(1, steps + 1)]

    before = digests()
    assert before == [StateSample(big(), steps).take(step) for step in range(1, steps + 1)]
    for parameter in parameters:
        flat = parameter.view(-1) if parameter.is_contiguous() else parameter.as_strided((parameter.numel(),), (1,))
        for at in {0, parameter.numel() // 2, parameter.numel() - 1} if parameter.numel() else ():
            kept = flat[at].clone()
            flat[at] += 1
            assert digests() != before
            flat[at] = kept
    assert digests() == before


@given(st.lists(st.integers(0, 200_000), max_size=60), st.integers(1, 100))
def test_windows_hold_all_bytes_once_and_are_no_more_than_asked_for(sizes: list[int], steps: int) -> None:
    windows = _windows(sizes, steps)
    assert len(windows) <= max(1, steps)
    seen = [0] * len(sizes)
    for index, start, size in itertools.chain.from_iterable(windows):
        assert start == seen[index]
        seen[index] += size
    assert seen == sizes


def test_equal_windows_of_different_steps_have_different_digests() -> None:
    zeros = StateSample([torch.zeros(100)], 10)
    assert len({zeros.take(step) for step in range(50)}) == 50


def test_nothing_to_compare_is_none() -> None:
    assert StateSample([], 10).take(3) is None
    assert StateSample([torch.empty(0)], 10).take(3) is None
    assert StateSample([torch.randn(6)[::2]], 10).take(3) is None


# ------------------------------------------------------------ the vote


@pytest.mark.parametrize("use_async", [True, False])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_replica_that_differs_is_found_at_its_next_vote_and_healed(
    cluster: Cluster, victim: int, use_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = [Replica(i, steps=8, use_async_quorum=use_async) for i in range(3)]
    replicas[victim].actions[3, "boundary"] = drift
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 3
    assert f"r{victim}:" in next(m.getMessage() for m in caplog.records if "differs from the others" in m.getMessage())
    assert len({digest_of(r.model.state_dict(), r.inner.state_dict()) for r in replicas}) == 1
    by_step: dict[int, set[str]] = {}
    for replica in replicas:
        for commit in replica.commits:
            by_step.setdefault(commit.step, set()).add(commit.digest)
    assert all(len(digests) == 1 for digests in by_step.values()), "nobody committed on another state"
    assert [r.vetoes for r in replicas] == [[3]] * 3


def test_what_changes_within_a_step_is_not_compared(cluster: Cluster) -> None:
    """As sharpness-aware minimization does: each replica computes its gradient at weights of its own."""

    class Perturbed(Replica):
        def loss(self) -> torch.Tensor:
            self.kept = [p.detach().clone() for p in self.model.parameters()]
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(0.01 * (self.index + 1))
            return super().loss()

        def at(self, point: str) -> None:
            if point == "backward":
                with torch.no_grad():
                    for parameter, kept in zip(self.model.parameters(), self.kept, strict=True):
                        parameter.copy_(kept)
            super().at(point)

    replicas = [Perturbed(i) for i in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in replicas] == [[], []]


def test_replicas_that_always_differ_are_told_and_left_alone(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """As on machines whose arithmetic differs: healing again and again would help nobody."""
    replicas = [Replica(0, steps=20), Replica(1, steps=20)]
    replicas[1].actions.update({(step, "boundary"): drift for step in range(2, 20)})
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 2
    assert all(r.commits[-1].step == 20 for r in replicas)
    assert [r.vetoes for r in replicas] == [[*range(2, 2 + TIRED_AFTER)]] * 2
    told = [m for m in caplog.records if "compute differently" in m.getMessage()]
    assert len(told) == 2, "one line per replica"


def without_the_model(replica: Replica) -> None:
    replica.wrap()
    replica.state_dict = lambda: {"optim": replica.inner.state_dict()}  # type: ignore[method-assign]
    replica.load_state_dict = lambda state: replica.inner.load_state_dict(state["optim"])  # type: ignore[method-assign]


def test_a_model_that_nobody_heals_is_reported(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Its parameters differ from the start, because state_dict does not return them."""
    cluster.run(*[Replica(i, setup=without_the_model, optim=plain_sgd) for i in range(2)])
    told = [m.getMessage() for m in caplog.records if m.levelname == "ERROR"]
    assert any("is the model in what state_dict returns?" in message for message in told), told


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_it_can_be_switched_off(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    replicas = [Replica(i, parity_sample_steps=0) for i in range(2)]
    replicas[1].actions[3, "boundary"] = drift
    cluster.run(*replicas)
    assert [r.vetoes for r in replicas] == [[], []]
    assert not [m for m in caplog.records if m.levelname == "ERROR"]
