"""The reducer on one process: what is launched when, with what in it, and what a failure does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ft_core.errors import ConfigError, UsageError
from ft_core.protocol.rank.ballot import FENCE_SLOTS
from tests.reduction.fakes import FakeAttempt, FakeHost, wrap

ONE = ["ready", "fence", "arrived"]


def mlp(layers: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def inputs(seed: int = 0, width: int = 4) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(seed))


def local_gradients(module: nn.Module, *args: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(module(*args).square().sum(), list(module.parameters()))
    return [g.clone() for g in gradients]


def backward(model: nn.Module, seed: int = 0) -> None:
    model(inputs(seed)).square().sum().backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---------------------------------------------------------------------------------------------------- the normal course


def test_a_small_model_is_one_collective_a_step() -> None:
    model, host = wrap(mlp())
    for _ in range(3):
        attempt = host.start()
        model.zero_grad()
        backward(model)
        model.gradient_reducer.flush()
        assert attempt.events == ONE
        model.gradient_reducer.committed()


def test_gradients_are_scaled_summed_and_views_of_the_bucket() -> None:
    module = mlp()
    expected = local_gradients(module, inputs())
    model, host = wrap(module)
    peers = [torch.ones(60 + FENCE_SLOTS + 6)]
    attempt = host.start(scale=1 / 3, peers=peers)
    backward(model)
    assert equal(gradients(model), [g * (1 / 3) + 1 for g in expected])
    flat = attempt.works[0].tensor
    assert all(g.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for g in gradients(model))
    assert attempt.tails[0].tolist() == [float(i + 2) for i in range(FENCE_SLOTS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("participants", [1, 3, 7])
def test_the_scale_rounds_like_a_python_number(dtype: torch.dtype, participants: int) -> None:
    module = nn.Linear(1000, 1, bias=False, dtype=dtype)
    factor = torch.randn(1000, dtype=dtype)
    (expected,) = torch.autograd.grad(module(factor).abs().sum(), module.weight)
    model, host = wrap(module)
    host.start(scale=1 / participants)
    model(factor).abs().sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, expected * (1 / participants))


def test_buckets_launch_in_layout_order_while_backward_runs() -> None:
    model, host = wrap(mlp(), bucket_cap_mb=1e-5)
    assert [[m.parameter for m in b.members] for b in model.gradient_reducer.plan.buckets] == [
        [5],
        [4],
        [3],
        [2],
        [1],
        [0],
    ]
    attempt = host.start()
    order: list[str] = []
    # AccumulateGrad of the first layer runs last, when the other layers' buckets must be on their way.
    model.module[0].weight.register_hook(lambda _: order.extend(attempt.events))
    backward(model)
    assert order.count("bucket") >= 3
    assert attempt.events == ["ready", *["bucket"] * 5, "fence", "arrived"]


def test_gradients_that_arrive_in_another_order_change_nothing_on_the_wire() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, *, swap: bool) -> Any:
            return self.first(self.second(x)) if swap else self.second(self.first(x))

    model, host = wrap(Reversed(), bucket_cap_mb=1e-5)
    sizes = []
    for swap in (False, True):
        attempt = host.start()
        model(inputs(), swap=swap).sum().backward()
        sizes.append([tensor.numel() for tensor in attempt.sent])
        assert attempt.events[-1] == "arrived"
    assert sizes[0] == sizes[1] == [4, 16, 4, 16 + FENCE_SLOTS + 4]


def test_a_second_backward_reduces_the_average_plus_the_new_gradient() -> None:
    module = mlp()
    one, two = local_gradients(module, inputs(1)), local_gradients(module, inputs(2))
    model, host = wrap(module)
    attempt = host.start(scale=0.5)
    backward(model, 1)
    backward(model, 2)
    assert attempt.events == ["ready", "fence", "arrived"] * 2
    assert equal(gradients(model), [(a * 0.5 + b) * 0.5 for a, b in zip(one, two, strict=True)])


def test_no_sync_accumulates_and_the_next_backward_reduces_the_sum() -> None:
    module = mlp()
    one, two = local_gradients(module, inputs(1)), local_gradients(module, inputs(2))
    model, host = wrap(module)
    attempt = host.start(scale=0.5)
    with model.no_sync():
        backward(model, 1)
    assert attempt.events == []
    backward(model, 2)
    assert attempt.events == ONE
    assert equal(gradients(model), [(a + b) * 0.5 for a, b in zip(one, two, strict=True)])
    model.zero_grad()
    with model.no_sync():
        backward(model, 1)
    assert equal(gradients(model), one)


def test_a_forward_outside_no_sync_makes_its_backward_synchronize() -> None:
    model, host = wrap(mlp())
    attempt = host.start()
    loss = model(inputs()).sum()
    with model.no_sync():
        loss.backward()
    assert attempt.events == ONE


def test_zero_grad_that_keeps_the_tensors_works() -> None:
    module = mlp()
    expected = local_gradients(module, inputs())
    model, host = wrap(module)
    for _ in range(3):
        host.start(scale=0.5)
        model.zero_grad(set_to_none=False)
        backward(model)
        assert equal(gradients(model), [g * 0.5 for g in expected])


def test_two_forwards_one_backward_and_retain_graph() -> None:
    model, host = wrap(mlp())
    attempt = host.start()
    loss = model(inputs(1)).sum() + model(inputs(2)).sum()
    loss.backward(retain_graph=True)
    first = [g.clone() for g in gradients(model)]
    loss.backward()
    assert attempt.events == ["ready", "fence", "arrived"] * 2
    assert equal(gradients(model), [g * 2 for g in first])


def test_autograd_grad_and_double_backward_do_not_launch() -> None:
    module = mlp()
    model, host = wrap(module)
    attempt = host.start()
    x = inputs().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert attempt.events == []
    slope.square().sum().backward()
    assert attempt.events == ONE
    reference = torch.autograd.grad(
        torch.autograd.grad(module(x).square().sum(), x, create_graph=True)[0].square().sum(),
        list(module.parameters()),
    )
    assert equal(gradients(model), list(reference))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_reduces_detached() -> None:
    module = mlp()
    expected = local_gradients(module, inputs())
    model, host = wrap(module)
    host.start(scale=0.5)
    model(inputs()).square().sum().backward(create_graph=True)
    assert equal(gradients(model), [g * 0.5 for g in expected])
    assert not any(g.requires_grad for g in gradients(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    module = mlp(layers=4)
    expected = local_gradients(module, inputs())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model, host = wrap(Checkpointed(), bucket_cap_mb=1e-5)
    for _ in range(2):
        attempt = host.start()
        model.zero_grad()
        model(inputs().requires_grad_()).square().sum().backward()
        assert attempt.events == ["ready", *["bucket"] * 7, "fence", "arrived"]
        assert equal(gradients(model), expected)


def test_reentrant_checkpoints_with_an_unused_parameter_cost_one_vetoed_step() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"y": [checkpoint(self.b, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)]}

    model, host = wrap(Model())
    first = host.start()
    model(inputs().requires_grad_())["y"][0].sum().backward()
    model.gradient_reducer.flush()
    assert first.events == ["ready", "report", "fence", "arrived"]
    model.gradient_reducer.vetoed()
    second = host.start()
    model(inputs().requires_grad_())["y"][0].sum().backward()
    assert second.events == ONE
    assert model.module.a.weight.grad.abs().sum() > 0


def test_shared_parameters_are_reduced_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    expected = local_gradients(module, inputs())
    model, host = wrap(module)
    attempt = host.start()
    backward(model)
    assert attempt.events == ONE
    assert equal(gradients(model), expected)


def test_channels_last_gradients_keep_their_strides() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 8, 8)
    expected = local_gradients(module, x)
    model, host = wrap(module)
    host.start()
    model(x).square().sum().backward()
    assert equal(gradients(model), expected)
    assert module.weight.grad is not None
    assert module.weight.grad.stride() == module.weight.stride()


# ------------------------------------------------------------------------------------------------- unused parameters


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, which: str = "left") -> Any:
        return self.left(x) if which == "left" else self.right(x)


def test_a_parameter_that_nobody_used_has_no_gradient_and_does_not_decay() -> None:
    model, host = wrap(Branches(), bucket_cap_mb=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = model.module.right.weight.detach().clone()
    for _ in range(2):
        attempt = host.start()
        optimizer.zero_grad()
        model(inputs()).sum().backward()
        assert attempt.events == ["ready", *["bucket"] * 3, "fence", "arrived"]
        assert model.module.right.weight.grad is None
        optimizer.step()
        model.gradient_reducer.committed()
    assert torch.equal(model.module.right.weight, before)


def test_find_unused_parameters_false_counts_nobody_and_an_unused_parameter_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, host = wrap(Branches(), find_unused_parameters=False)
    assert model.gradient_reducer.plan.tail.used_numel == 0
    host.start(scale=0.0)
    model(inputs()).sum().backward()
    assert not caplog.records  # what a member without a contribution does not have is nobody's loss
    for _ in range(2):
        host.start()
        model.zero_grad()
        model(inputs()).sum().backward()
        assert torch.count_nonzero(model.module.right.weight.grad) == 0
    (record,) = caplog.records
    assert "parameter right.bias got no gradient" in record.getMessage()
    assert "find_unused_parameters=False" in record.getMessage()


def test_a_gradient_accumulated_under_no_sync_counts_where_the_last_backward_does_not_use_it() -> None:
    model, host = wrap(Branches())
    attempt = host.start(scale=0.5)
    with model.no_sync():
        model(inputs(), "right").sum().backward()
    accumulated = model.module.right.weight.grad.clone()
    model(inputs(), "left").sum().backward()
    assert attempt.events == ONE
    assert torch.equal(model.module.right.weight.grad, accumulated * 0.5)


def gradient_of(parameter: Any) -> Any:
    return parameter.grad


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_gradient_is_none_unless_a_participant_used_it(options: dict[str, bool]) -> None:
    model, host = wrap(Branches(), **options)
    tail = model.gradient_reducer.plan.tail
    attempt = host.start()
    model(inputs()).sum().backward()
    assert attempt.sent[0][tail.used : tail.used + 4].tolist() == [1, 1, 0, 0]
    assert gradient_of(model.module.right.weight) is None
    assert gradient_of(model.module.left.weight) is not None
    # Now a peer uses the other branch.
    peer = torch.zeros(tail.end)
    peer[tail.used : tail.used + 4] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    peer[: tail.fence] = 2.0
    model.zero_grad()
    host.start(peers=[peer])
    model(inputs()).sum().backward()
    assert torch.equal(gradient_of(model.module.right.weight), torch.full((4, 4), 2.0))
    # A member that does not contribute follows the others, whatever it used itself.
    model.zero_grad()
    host.start(scale=0.0, peers=[peer])
    model(inputs()).sum().backward()
    assert gradient_of(model.module.left.weight) is None
    assert torch.equal(gradient_of(model.module.right.weight), torch.full((4, 4), 2.0))


# ------------------------------------------------------------------------------------------------------ not taking part


def test_a_member_that_does_not_contribute_sends_exact_zeros_even_with_nan_gradients() -> None:
    model, host = wrap(mlp())
    for _ in range(2):  # the second time .grad is the view, full of what the first reduction brought
        attempt = host.start(scale=0.0, peers=[torch.full((60 + FENCE_SLOTS + 6,), 3.0)])
        (model(inputs()) * float("nan")).sum().backward()
        assert torch.equal(attempt.sent[0][:60], torch.zeros(60))
        assert all(torch.equal(g, torch.full_like(g, 3.0)) for g in gradients(model))


def test_flush_launches_everything_with_zeros_when_there_was_no_backward() -> None:
    model, host = wrap(mlp(), bucket_cap_mb=1e-5)
    sizes = [4, 16, 4, 16, 4, 16 + FENCE_SLOTS + 6]
    attempt = host.start(peers=[torch.ones(size) for size in sizes])
    with model.no_sync():
        backward(model)
    model.gradient_reducer.flush()
    assert [tensor.numel() for tensor in attempt.sent] == sizes
    assert all(torch.count_nonzero(tensor[:16]) == 0 for tensor in attempt.sent)
    assert attempt.events[-1] == "arrived"
    assert all(torch.equal(g, torch.ones_like(g)) for g in gradients(model))
    model.gradient_reducer.flush()
    assert len(attempt.sent) == 6
    model.gradient_reducer.committed()
    model.gradient_reducer.flush()  # a second vote in the same attempt needs a fence of its own
    assert len(attempt.sent) == 12


def test_flush_without_a_quorum_or_in_a_broken_one_does_nothing() -> None:
    model, host = wrap(mlp())
    model.gradient_reducer.flush()
    attempt = host.start(is_ready=False)
    model.gradient_reducer.flush()
    assert attempt.events == ["ready"]


def test_nothing_is_touched_in_an_attempt_that_is_already_broken() -> None:
    module = mlp()
    expected = local_gradients(module, inputs())
    model, host = wrap(module)
    attempt = host.start(is_ready=False)
    backward(model)
    assert attempt.events == ["ready"]
    assert equal(gradients(model), expected)


def test_eval_and_no_grad_need_no_manager() -> None:
    model, _ = wrap(mlp())
    with torch.no_grad():
        model(inputs())
    model.eval()
    model(inputs())


def test_backward_without_start_quorum_says_what_to_do() -> None:
    model, _ = wrap(mlp())
    loss = model(inputs()).sum()
    with pytest.raises(UsageError, match="start_quorum"):
        loss.backward()


# ------------------------------------------------------------------------------------------------------------- failures


def many() -> tuple[Any, FakeHost]:
    return wrap(mlp(), bucket_cap_mb=1e-5)


def test_a_refused_launch_ends_the_round_quietly() -> None:
    model, host = many()
    attempt = host.start(refuse_at=2)
    backward(model)
    model.gradient_reducer.flush()
    assert attempt.events == ["ready", "bucket", "bucket", "refused"]
    assert all(work.waited for work in attempt.works)
    assert len(attempt.works) == 2


@pytest.mark.parametrize("fail_at", [0, 3, 5])
def test_a_failed_collective_does_not_raise_and_all_others_are_waited_for(fail_at: int) -> None:
    model, host = many()
    attempt = host.start(fail_at=fail_at)
    backward(model)
    assert attempt.events == ["ready", *["bucket"] * 5, "fence", "fail"]
    assert [str(error) for error in attempt.errors] == ["connection closed by peer"]
    assert all(work.waited for work in attempt.works)
    spoilt = [index for index, gradient in enumerate(gradients(model)) if gradient.isnan().any()]
    assert spoilt == [member.parameter for member in model.gradient_reducer.plan.buckets[fail_at].members]
    model.gradient_reducer.flush()
    backward(model)
    assert attempt.events[-1] == "fail"


def test_a_round_that_cannot_follow_a_complete_one_breaks_the_attempt() -> None:
    model, host = wrap(mlp())
    attempt = host.start()
    backward(model)
    attempt.is_ready = False
    backward(model)
    assert attempt.events == [*ONE, "ready", "fail"]


def test_the_step_after_a_failure_is_clean() -> None:
    module = mlp()
    expected = local_gradients(module, inputs())
    model, host = wrap(module, bucket_cap_mb=1e-5)
    host.start(fail_at=1)
    backward(model)
    model.gradient_reducer.vetoed()
    model.zero_grad()
    attempt = host.start()
    backward(model)
    assert attempt.events[-1] == "arrived"
    assert equal(gradients(model), expected)


def test_an_attempt_that_raises_is_a_failed_one() -> None:
    def raising(flat: Tensor, tail: Tensor) -> None:
        raise ZeroDivisionError

    model, host = many()
    attempt = host.start()
    attempt.launch_fence = raising  # type: ignore[method-assign]
    backward(model)
    assert isinstance(attempt.errors[0], ZeroDivisionError)


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise MemoryError("out of memory")


def explode(model: Any) -> None:
    first, *rest = model.module
    x = first(inputs())
    x = Bomb.apply(x)  # type: ignore[no-untyped-call]
    for layer in rest:
        x = layer(x)
    model.module.forward = lambda _: x
    with pytest.raises(MemoryError):
        model(inputs()).sum().backward()
    del model.module.forward


@pytest.mark.parametrize("then", ["flush", "forward"])
def test_a_backward_that_raised_is_completed_with_zeros_and_vetoed(then: str) -> None:
    model, host = many()
    attempt = host.start()
    explode(model)
    assert attempt.events == ["ready", *["bucket"] * 4]
    model.gradient_reducer.flush() if then == "flush" else model(inputs())
    assert attempt.events == ["ready", *["bucket"] * 4, "report", "bucket", "fence", "arrived"]
    assert "backward() ended before" in str(attempt.reports[0])
    model.gradient_reducer.vetoed()
    fresh = host.start()
    model.zero_grad()
    backward(model)
    assert fresh.events == ["ready", *["bucket"] * 5, "fence", "arrived"]


def test_a_backward_that_raised_before_any_launch_may_be_repeated() -> None:
    model, host = wrap(mlp())
    attempt = host.start()
    explode(model)
    model.zero_grad()
    backward(model)
    assert attempt.events == ["ready", "ready", "fence", "arrived"]
    assert attempt.reports == []


class Twice(nn.Module):
    def __init__(self, *, more: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4) if more else nn.Identity()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


def test_a_parameter_in_two_reentrant_checkpoints_is_refused_by_name() -> None:
    model, host = wrap(Twice(more=True))
    attempt = host.start()
    with pytest.raises(UsageError, match=r"layer\.(weight|bias) got its gradient twice"):
        model(inputs().requires_grad_()).sum().backward()
    assert len(attempt.errors) == 1


def test_two_whole_rounds_in_one_backward_add_up() -> None:
    model, host = wrap(Twice(more=False))
    attempt = host.start()
    model(inputs().requires_grad_()).sum().backward()
    assert attempt.events == ["ready", "fence", "arrived"] * 2
    got = [g.clone() for g in gradients(model)]
    model.zero_grad()
    x = inputs()
    expected = torch.autograd.grad(
        model.module.layer(model.module.layer(x)).sum(), list(model.module.layer.parameters())
    )
    assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))


def test_a_module_cast_after_wrapping_is_refused_by_name() -> None:
    model, host = wrap(nn.Linear(4, 4))
    model.module.double()
    attempt = host.start()
    with pytest.raises(UsageError, match=r"gradient of (weight|bias) is torch\.float64 .* torch\.float32 .*casting"):
        model(inputs().double()).sum().backward()
    assert len(attempt.errors) == 1


def test_a_sparse_gradient_is_refused_by_name() -> None:
    module = nn.Embedding(10, 4)
    model, host = wrap(module)
    module.sparse = True
    attempt = host.start()
    loss = model(torch.tensor([1, 2])).sum()
    with pytest.raises(ConfigError, match="weight has a sparse gradient"):
        loss.backward()
    assert len(attempt.errors) == 1


# ---------------------------------------------------------------------------------------------- after the fence arrived


def test_rescale_reaches_gradients_the_caller_replaced_and_not_the_tail() -> None:
    module = mlp()
    model, host = wrap(module)
    attempt = host.start()
    backward(model)
    expected = [g * 3 for g in gradients(model)]
    module[0].weight.grad = gradients(model)[0].clone()
    model.gradient_reducer.rescale(3.0)
    assert equal(gradients(model), expected)
    assert attempt.works[0].tensor[60:-6].tolist() == [float(i + 1) for i in range(FENCE_SLOTS)]


def test_repr_is_a_summary() -> None:
    model, _ = wrap(mlp())
    assert (
        repr(model.gradient_reducer)
        == f"BucketReducer(6 parameters, 1 buckets, plan {model.gradient_reducer.plan.digest:016x}, idle)"
    )


def test_a_round_reads_the_scale_of_its_own_attempt() -> None:
    model, host = wrap(mlp())
    sums = []
    for scale in (1.0, 0.5, 1.0):
        model.zero_grad()
        attempt: FakeAttempt = host.start(scale=scale)
        backward(model)
        sums.append(attempt.sent[0][:60].clone())
    assert torch.equal(sums[0] * 0.5, sums[1])
    assert torch.equal(sums[0], sums[2])


def test_after_an_attempt_that_was_broken_before_backward_no_sync_still_accumulates() -> None:
    """Else that backward would be reduced, and pair with the peers' real reduction: a commit without these samples."""
    model, host = wrap(mlp())
    broken = host.start(is_ready=False)
    backward(model, 1)  # was to be reduced: there was nobody to reduce with
    assert broken.events == ["ready"]
    model._reducer.vetoed()
    attempt = host.start()
    with model.no_sync():
        backward(model, 1)
    assert attempt.events == []
    backward(model, 2)
    assert attempt.events == ONE
