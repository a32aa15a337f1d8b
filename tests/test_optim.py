"""The optimizer wrapper with a fake manager: order of calls, vetoes, torn state, schedulers, GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

from ft_core.data import LearningRateScaling
from ft_core.errors import ConfigError, UsageError
from ft_core.optim import Optimizer, OptimizerWrapper
from tests.fakes import FakeManager


def wrapped(manager: FakeManager, lr: float = 0.5) -> tuple[nn.Parameter, OptimizerWrapper]:
    parameter = nn.Parameter(torch.ones(2))
    return parameter, OptimizerWrapper(manager, SGD([parameter], lr=lr))


def test_zero_grad_starts_the_quorum_before_it_clears() -> None:
    manager = FakeManager()
    parameter, optimizer = wrapped(manager)
    parameter.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert manager.calls == ["start_quorum"]
    assert parameter.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_step_is_applied_only_on_a_commit() -> None:
    manager = FakeManager([True, False])
    parameter, optimizer = wrapped(manager)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.committed
    assert parameter.tolist() == [0.5, 0.5]
    optimizer.step()
    assert not optimizer.committed
    assert parameter.tolist() == [0.5, 0.5]
    assert manager.calls == ["should_commit", "should_commit"]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_an_inner_step_that_fails_after_the_commit_tears_the_state(error: BaseException) -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise error

    manager = FakeManager([True])
    optimizer = OptimizerWrapper(manager, Failing([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(type(error)):
        optimizer.step()
    assert manager.torn == [error]
    assert not optimizer.committed


def test_closures_are_refused_before_the_vote() -> None:
    manager = FakeManager()
    _, optimizer = wrapped(manager)
    with pytest.raises(ConfigError, match="takes no closure"):
        optimizer.step(lambda: 1.0)
    assert not manager.calls


def test_bad_inner_optimizers() -> None:
    _, optimizer = wrapped(FakeManager())
    with pytest.raises(ConfigError, match="wrapped already"):
        OptimizerWrapper(FakeManager(), optimizer)
    with pytest.raises(ConfigError, match=r"must be a torch\.optim\.Optimizer, got str"):
        OptimizerWrapper(FakeManager(), "adam")  # type: ignore[arg-type]


def test_it_is_the_inner_optimizer_in_all_else() -> None:
    parameter, optimizer = wrapped(FakeManager())
    inner = optimizer.optim
    assert Optimizer is OptimizerWrapper
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.25})
    assert [group["lr"] for group in inner.param_groups] == [0.5, 0.25]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = optimizer.nonsense
    assert parameter is optimizer.param_groups[0]["params"][0]


def test_state_dict_round_trip_keeps_live_views() -> None:
    source = nn.Parameter(torch.ones(2))
    optimizer = OptimizerWrapper(FakeManager(), AdamW([source]))
    source.grad = torch.ones(2)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    fresh = OptimizerWrapper(FakeManager(), AdamW([nn.Parameter(torch.ones(2))], lr=9.0))
    fresh.load_state_dict(saved)
    assert fresh.param_groups is fresh.optim.param_groups
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert fresh.state_dict()["state"][0]["step"] == 1


def test_hooks_run_with_the_inner_step_only() -> None:
    parameter, optimizer = wrapped(FakeManager([False, True]))
    seen: list[torch.optim.Optimizer] = []
    optimizer.register_step_post_hook(lambda inner, *_: seen.append(inner))
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert not seen
    optimizer.step()
    assert seen == [optimizer.optim]


def test_it_cannot_be_copied() -> None:
    _, optimizer = wrapped(FakeManager())
    with pytest.raises(UsageError, match=r"copy its \.optim"):
        copy.deepcopy(optimizer)


def test_repr() -> None:
    _, optimizer = wrapped(FakeManager())
    assert repr(optimizer) == "OptimizerWrapper(SGD, param_groups=1, committed=False)"


def test_learning_rate_schedulers() -> None:
    # filterwarnings=error: a scheduler that thinks `step` was never called would warn, and so fail here.
    parameter, optimizer = wrapped(FakeManager([True, False, True]), lr=1.0)
    halving = StepLR(optimizer, step_size=1, gamma=0.5)
    constant = LambdaLR(optimizer, lambda _: 1.0)
    rates = []
    for _ in range(3):
        optimizer.zero_grad()
        parameter.grad = torch.ones(2)
        optimizer.step()
        if optimizer.committed:
            halving.step()
        rates.append(optimizer.optim.param_groups[0]["lr"])
    constant.step()
    assert rates == [0.5, 0.5, 0.25]
    assert parameter.tolist() == [-0.5, -0.5]


class TestGradScaler:
    def run(self, manager: FakeManager, grad: float, inner_amp: bool = False, unscale: bool = False) -> tuple[Any, ...]:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = OptimizerWrapper(manager, SGD([parameter], lr=1.0, fused=True if inner_amp else None))
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
        scaler.scale(torch.ones(1))
        parameter.grad = torch.full((2,), grad * 8.0)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(None if optimizer.committed else scaler.get_scale())
        return parameter.tolist(), scaler.get_scale(), optimizer.committed

    @pytest.mark.parametrize("inner_amp", [False, True])
    @pytest.mark.parametrize("unscale", [False, True])
    def test_finite_gradients_are_unscaled_once(self, inner_amp: bool, unscale: bool) -> None:
        assert self.run(FakeManager(), 0.25, inner_amp, unscale) == ([0.75, 0.75], 16.0, True)

    @pytest.mark.parametrize("inner_amp", [False, True])
    def test_an_overflow_is_voted_on_and_not_applied(self, inner_amp: bool) -> None:
        manager = FakeManager()
        assert self.run(manager, float("inf"), inner_amp) == ([1.0, 1.0], 4.0, True)
        assert manager.calls == ["should_commit"]

    @pytest.mark.parametrize("grad", [0.25, float("inf")])
    def test_a_veto_keeps_parameters_and_scale(self, grad: float) -> None:
        assert self.run(FakeManager([False]), grad) == ([1.0, 1.0], 8.0, False)


def test_learning_rates_follow_the_weight_of_the_committed_step() -> None:
    """Only inside the step: a scheduler reads and writes the unscaled ones."""
    manager = FakeManager()
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = OptimizerWrapper(manager, SGD([parameter], lr=0.5), lr_scaling=LearningRateScaling("linear", 32))
    scheduler = LambdaLR(optimizer.optim, lambda step: 1.0 / (step + 1))
    for weight, expected in ((32, -0.5), (16, -0.625), (64, -0.625 - 2 * 0.5 / 3)):
        manager.last_commit_weight = weight
        parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert parameter.item() == pytest.approx(expected)
        assert optimizer.lr_factor == weight / 32
    assert optimizer.param_groups[0]["lr"] == 0.125
    manager.votes = [False]
    optimizer.step()
    assert optimizer.lr_factor == 2.0
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_learning_rates_are_put_back_when_the_step_fails() -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("out of memory")

    manager = FakeManager()
    manager.last_commit_weight = 8
    inner = Failing([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = OptimizerWrapper(manager, inner, lr_scaling=LearningRateScaling("sqrt", 2))
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert inner.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("rule", "reference", "words"),
    [("cubic", 8, "'linear' or 'sqrt'"), ("linear", 0, "reference=0"), ("sqrt", 1.5, "reference must be an int")],
)
def test_a_rule_that_cannot_be(rule: str, reference: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LearningRateScaling(rule, reference)
