"""What loops with several backwards and several optimizers per forward need: toggled parameters, late flushes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_core.errors import UsageError
from ft_core.protocol.rank.ballot import FENCE_SLOTS
from tests.reduction.fakes import wrap
from tests.reduction.test_bucket_reducer import backward, equal, gradients, inputs, local_gradients, mlp

ONE = ["ready", "fence", "arrived"]


def test_with_find_unused_a_frozen_parameter_is_an_unused_one() -> None:
    module: Any = mlp()
    model, host = wrap(module, find_unused_parameters=True)
    module[1].requires_grad_(False)
    attempt = host.start()
    backward(model)
    assert attempt.events == ONE
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True, False, False]
    model.gradient_reducer.committed()
    model.zero_grad()
    module[1].requires_grad_(True)
    host.start()
    backward(model)
    assert len(gradients(model)) == 6


def test_a_frozen_parameter_takes_the_gradient_of_those_that_have_one() -> None:
    module: Any = mlp(1)
    model, host = wrap(module, find_unused_parameters=True)
    module[0].bias.requires_grad_(False)
    numbers = 4 * 4 + 4
    peers = torch.ones(numbers + FENCE_SLOTS + 2)  # gradients, fence, and that they used both parameters
    host.start(scale=0.5, peers=[peers])
    backward(model)
    assert module[0].bias.grad.tolist() == [1.0] * 4


def test_thawing_is_refused_also_with_find_unused() -> None:
    module: Any = mlp()
    module[0].bias.requires_grad_(False)
    model, _ = wrap(module, find_unused_parameters=True)
    module[1].bias.requires_grad_(False)
    module[0].bias.requires_grad_(True)
    with pytest.raises(UsageError, match=r"requires_grad of 0\.bias was False .* on all of them$"):
        model(inputs())


def test_freezing_without_find_unused_names_the_argument() -> None:
    module: Any = mlp()
    model, _ = wrap(module)
    module[1].bias.requires_grad_(False)
    with pytest.raises(UsageError, match=r"1\.bias was True .* or wrap it with find_unused_parameters=True"):
        model(inputs())


def test_before_backward_decides_whatever_forward_said() -> None:
    model, host = wrap(mlp())
    attempt = host.start()
    output = model(inputs()).square().sum()
    model.gradient_reducer.before_backward(sync=False)
    output.backward(retain_graph=True)
    assert attempt.events == []
    assert not model.gradient_reducer.unsettled
    model.gradient_reducer.before_backward(sync=True)
    output.backward()
    assert attempt.events == ONE
    assert model.gradient_reducer.unsettled
    assert equal(gradients(model), [2 * g for g in local_gradients(model.module, inputs())])
    model.gradient_reducer.committed()
    assert not model.gradient_reducer.unsettled


def test_a_broken_round_is_unsettled_until_the_veto() -> None:
    model, host = wrap(mlp())
    host.start(is_ready=False)
    backward(model)
    assert model.gradient_reducer.unsettled
    model.gradient_reducer.vetoed()
    assert not model.gradient_reducer.unsettled


@pytest.mark.parametrize("with_accumulated", [False, True])
def test_a_flush_without_any_round_reduces_zeros_or_what_is_there(with_accumulated: bool) -> None:
    model, host = wrap(mlp())
    attempt = host.start(scale=0.5)
    with model.no_sync():
        backward(model)
    model.gradient_reducer.flush(with_accumulated=with_accumulated)
    assert attempt.events == ONE
    if with_accumulated:
        assert equal(gradients(model), [0.5 * g for g in local_gradients(model.module, inputs())])
    else:
        assert torch.count_nonzero(attempt.sent[0][:60]) == 0
        assert all(parameter.grad is None for parameter in model.parameters())  # nobody used any of them
