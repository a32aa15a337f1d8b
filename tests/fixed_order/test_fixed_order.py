"""The reducer alone: what goes wrong in a step, and what never may."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ft_core.errors import CollectiveError, UsageError
from ft_core.fixed_order import FixedOrderDataParallel
from ft_core.reduction.fixed_order import tree_exchange
from tests.fixed_order.host import Host, wrap
from tests.fixed_order.reference import CLASSES, FEATURES
from tests.reduction.fakes import FakeAttempt


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


class Calls(nn.Module):
    """Counts them in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def one_step(model: Any, host: Host, loader: Any, *, batches: Any = None) -> None:
    """All micro-batches of a step up to the vote."""
    for batch in batches or loader:
        loss = loss_of(model, batch)
        model.record_loss(loss)
        loss.backward()
        if loader.last_micro_batch:
            return


def bits(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_gradients_are_final_when_backward_returns() -> None:
    model, host, loader = wrap(linear())
    one_step(model, host, loader)
    attempt = host.attempts[-1]
    assert attempt.events == ["ready", "bucket", "bucket", "fence", "arrived"]  # the header, the gradients, the fence
    assert all(grad.abs().sum() > 0 for grad in bits(model))
    assert model.step_loss is None
    host.end()
    assert model.step_loss == pytest.approx(math.log(CLASSES), abs=0.7)
    assert host.whole_steps


def test_the_host_decides_by_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of its nodes, the header, the fence: nothing else of what lies on the device."""
    reads: list[torch.dtype] = []

    def read(_: FakeAttempt, tensor: Tensor) -> Tensor:
        reads.append(tensor.dtype)
        told = tensor.clone()
        if tensor.dtype == torch.float32:
            told.fill_(5)
        return told

    monkeypatch.setattr(FakeAttempt, "read", read)
    model, host, loader = wrap(linear())
    one_step(model, host, loader)
    assert reads == [torch.float64, torch.int64, torch.float32]
    assert host.attempts[-1].tails[0].unique().tolist() == [5.0]


def test_small_exchanges_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, host, loader = wrap(linear())
    one_step(model, host, loader)
    expected = bits(model)
    monkeypatch.setattr(tree_exchange, "EXCHANGE_BYTES", 16)
    model, host, loader = wrap(linear())
    one_step(model, host, loader)
    assert all(torch.equal(a, b) for a, b in zip(expected, bits(model), strict=True))
    assert len(host.attempts[-1].sent) > 10


def test_bits_travel_unchanged() -> None:
    """A minus zero and a NaN come out as they went in, also among the zeros of others."""
    module = nn.Linear(4, 1, bias=False)
    _model, host, loader = wrap(module, global_batch_size=2)
    odd = torch.tensor([[-0.0, float("nan"), float("-inf"), 1e-42]])
    host.faults = {"peers": [torch.zeros(2 * 1 + 1 + 3, dtype=torch.int64), torch.full((4,), -0.0)]}
    next(iter(loader))
    (module.weight * odd).sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad.view(torch.int32), odd.view(torch.int32))


def test_a_participant_that_gives_nothing_costs_the_step() -> None:
    """Nothing but the fence follows the header, and gradients of a part of the step are seen by nobody."""
    model, host, loader = wrap(linear(), Host(groups=2))
    one_step(model, host, loader)
    attempt = host.attempts[-1]
    assert attempt.events == ["ready", "bucket", "report", "fence", "arrived"]
    assert isinstance(attempt.reports[0], CollectiveError)
    assert "micro-batches of this step are missing" in str(attempt.reports[0])
    assert bits(model) == []
    host.end(commit=False)
    assert model.step_loss is None


def test_replicas_that_divide_differently_are_told_so() -> None:
    model, host, loader = wrap(linear())
    others = torch.zeros(2 * 4 + 2 + 3, dtype=torch.int64)
    others[-2:] = torch.tensor([1, 3])
    host.faults = {"peers": [others]}
    one_step(model, host, loader)
    assert "different numbers of micro-batches" in str(host.attempts[-1].reports[0])


def test_one_that_does_not_participate_follows() -> None:
    """It gives zeros to everything, of the same sizes, and ends with the others' gradients."""
    giver, host, loader = wrap(linear())
    one_step(giver, host, loader)
    header, gradients, _ = host.attempts[-1].sent
    follower, other, fillers = wrap(linear(), Host(groups=1, place=None))
    other.faults = {"scale": 0.0, "peers": [header, gradients]}
    one_step(follower, other, fillers)
    assert not any(sent.any() for sent in other.attempts[-1].sent[:2])
    assert all(torch.equal(a, b) for a, b in zip(bits(giver), bits(follower), strict=True))
    host.end()
    other.end()
    assert giver.step_loss == follower.step_loss is not None


@pytest.mark.parametrize("fault", ["refuse_at", "fail_at"])
@pytest.mark.parametrize("at", range(4))
def test_a_failed_collective_never_leaves_backward(monkeypatch: pytest.MonkeyPatch, fault: str, at: int) -> None:
    monkeypatch.setattr(tree_exchange, "EXCHANGE_BYTES", 32 * 3)
    model, host, loader = wrap(linear())
    host.faults = {fault: at}
    one_step(model, host, loader)
    attempt = host.attempts[-1]
    assert all(work.waited for work in attempt.works)
    assert bool(attempt.errors) == (fault == "fail_at")
    assert "arrived" not in attempt.events
    assert bits(model) == []
    host.end(commit=False)
    host.faults = {}
    one_step(model, host, loader)
    assert host.attempts[-1].events[-1] == "arrived"
    assert len(bits(model)) == 2


def test_a_broken_quorum_launches_nothing() -> None:
    model, host, loader = wrap(linear())
    host.faults = {"is_ready": False}
    one_step(model, host, loader)
    host.end(commit=False)
    assert host.attempts[-1].events == ["ready"]


def test_unused_parameters_have_no_gradient() -> None:
    module = nn.Sequential(linear(), nn.Linear(2, 2))
    model, host, loader = wrap(module)
    for x, _ in loader:
        module[0](x).sum().backward()
        if loader.last_micro_batch:
            break
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]
    assert host.attempts[-1].reports == []
    host.end()
    assert model.step_loss is None  # nobody recorded one


def test_a_backward_that_raised_costs_the_step() -> None:
    model, host, loader = wrap(linear())
    failing = True

    def fail(_gradient: Tensor) -> None:
        if failing:
            raise RuntimeError("out of memory")

    handle = model.module.weight.register_hook(fail)
    batches = iter(loader)
    for batch in batches:
        with pytest.raises(RuntimeError, match="out of memory"):
            loss_of(model, batch).backward()
        break
    failing = False
    handle.remove()
    one_step(model, host, loader, batches=batches)
    host.end(commit=False)
    (report,) = host.attempts[-1].reports
    assert "lacks micro-batches" in str(report)
    assert "raised" in str(report)


def test_a_vote_without_all_micro_batches_is_a_veto() -> None:
    model, host, loader = wrap(linear())
    loss_of(model, next(iter(loader))).backward()
    host.end(commit=False)
    assert "before the backward() of the last micro-batch" in str(host.attempts[-1].reports[0])


def test_no_backward_is_found_out_with_the_next_batch() -> None:
    model, _, loader = wrap(linear())
    batches = iter(loader)
    loss = loss_of(model, next(batches))
    with pytest.raises(UsageError, match="for the one before"):
        next(batches)
    loss.backward()


def test_a_second_backward_is_refused() -> None:
    model, _, loader = wrap(linear())
    loss = loss_of(model, next(iter(loader)))
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="add the losses"):
        loss.backward()


def test_backward_outside_of_a_step_is_refused() -> None:
    model, _, _ = wrap(linear())
    with pytest.raises(UsageError, match="outside of a step"):
        model(torch.zeros(1, FEATURES)).sum().backward()
    with torch.no_grad():
        model(torch.zeros(1, FEATURES))


def test_reentrant_checkpoints_are_refused() -> None:
    model, _, loader = wrap(linear())
    x, _y = next(iter(loader))
    x.requires_grad_()
    with pytest.raises(UsageError, match="use_reentrant=False"):
        checkpoint(model, x, use_reentrant=True).sum().backward()


def test_other_checkpoints_work() -> None:
    model, host, loader = wrap(linear())
    one_step(model, host, loader)
    expected = bits(model)
    model, host, loader = wrap(linear())
    for batch in loader:
        x, y = batch
        nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
        if loader.last_micro_batch:
            break
    assert all(torch.equal(a, b) for a, b in zip(expected, bits(model), strict=True))


def test_buffers_that_forward_changes_are_named() -> None:
    model, _, loader = wrap(nn.Sequential(Calls(), linear()))
    batch = next(iter(loader))
    loss = loss_of(model, batch)
    with pytest.raises(UsageError, match=r"changed buffers of the module: 0\.calls\. They"):
        loss.backward()


def test_losses_are_one_number_per_micro_batch() -> None:
    model, _, loader = wrap(linear())
    with pytest.raises(UsageError, match="current micro-batch"):
        model.record_loss(1.0)
    next(iter(loader))
    with pytest.raises(UsageError, match=r"one number.*\[2\]"):
        model.record_loss(torch.zeros(2))
    model.record_loss(torch.zeros(1))
    with pytest.raises(UsageError, match="twice"):
        model.record_loss(0.5)


def test_it_can_be_undone() -> None:
    model, host, loader = wrap(linear())
    assert repr(host.reducers[0]) == "FixedOrderReducer(micro-batch none, none, OrderedSum())"
    module = model.unwrap()
    assert host.reducers == []
    module(torch.ones(1, FEATURES)).sum().backward()
    assert module.weight.grad is not None
    again = FixedOrderDataParallel(host.manager, module, loader)
    one_step(again, host, loader)
    assert host.attempts[-1].events[-1] == "arrived"
    assert len(bits(again)) == 2
