"""Replica groups of several ranks: gradients are averaged over all ranks of all groups, and cross once per group."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ft_core.reduction.bucket_plan import WEIGHT_DIGITS
from ft_core.reduction.interface import FENCE_SLOTS
from tests.reduction.groups import TIMEOUT_S, Member, RingAttempt, World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.timeout(60)

SMALL_BUCKETS = 1e-4
"""MB: several buckets."""


@pytest.fixture(autouse=True, params=["shared", "messages"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the ranks of a group reach each other."""
    monkeypatch.setattr(World, "shared", request.param == "shared")


def net(wide: int = 7) -> nn.Sequential:
    """The same in every thread, whatever the others draw."""
    module = nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return module


def batch(number: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + number))


def alone(numbers: Sequence[int], weights: Sequence[float], step: int = 0) -> list[Tensor]:
    """The weighted mean of the gradients of these ranks' batches."""
    module, total = net(), sum(weights)
    for number, weight in zip(numbers, weights, strict=True):
        (module(batch(number, step)).square().mean() * (weight / total)).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def grads(model: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal_and_close(found: Sequence[list[Tensor]], expected: list[Tensor]) -> None:
    for other in found:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True)), "bit for bit"
    torch.testing.assert_close(found[0], expected)


def models(world: World, **options: Any) -> dict[Member, Any]:
    return dict(zip(world.members, world.run(lambda m: m.wrap(net(), **options)), strict=True))


def stepping(held: dict[Member, Any], begin: Callable[[Member], Any], step: int = 0) -> Callable[[Member], Any]:
    """A forward and a backward of each member."""

    def one(member: Member) -> list[Any]:
        model = held[member]
        for parameter in model.parameters():
            parameter.grad = None
        begin(member)
        model(batch(member.number, step)).square().mean().backward()
        return grads(model)

    return one


@pytest.mark.parametrize(("groups", "ranks"), [(2, 2), (2, 3), (3, 2), (1, 2)])
def test_gradients_are_the_mean_over_all_ranks_of_all_groups(groups: int, ranks: int) -> None:
    with World(groups, ranks) as world:
        held = models(world, bucket_cap_mb=SMALL_BUCKETS)
        assert len(held[world.members[0]].gradient_reducer.plan.buckets) > 2
        count = groups * ranks
        for step in range(3):
            found = world.run(stepping(held, Member.start_quorum, step))
            assert_equal_and_close(found, alone(range(count), [1] * count, step))
            assert all(member.attempt.verdict for member in world.members)  # type: ignore[union-attr]


@pytest.mark.parametrize("weights", [[3, 1, 5, 2], [0, 1, 1, 1], [70_000, 1 << 31, 1, 4095]])
def test_rings_that_disagree_about_weights(weights: list[int]) -> None:
    """Gradients are divided by what was contributed to them (R10): on whatever ring that is known."""
    with World(2, 2) as world:
        held = models(world, bucket_cap_mb=SMALL_BUCKETS)
        found = world.run(stepping(held, lambda m: m.start_quorum(weights[m.number])))
        assert_equal_and_close(found, alone(range(4), weights))
        held[world.members[0]].gradient_reducer.rescale(2.0)  # what the vote of one ring says comes later
        assert_equal_and_close([grads(held[world.members[0]])], found[0])


def test_each_rank_sends_its_shard_to_the_other_groups() -> None:
    """Over the ring of each rank: 2(n-1)/n of the gradient, divided by the number of ranks."""
    groups, ranks, wide = 2, 2, 256
    with World(groups, ranks) as world:
        held = dict(zip(world.members, world.run(lambda m: m.wrap(net(wide=wide))), strict=True))
        size = 4 * sum(p.numel() for p in held[world.members[0]].parameters())
        tail = 4 * (FENCE_SLOTS + 2 * 16 * ranks)
        before = [member.received() for member in world.members]
        world.run(stepping(held, Member.start_quorum))
        for member, then in zip(world.members, before, strict=True):
            assert size / ranks <= sum(member.attempt.sent) <= size / ranks + tail  # type: ignore[union-attr]
            came = member.received() - then
            expected = 2 * (groups - 1) / groups * size / ranks
            assert expected <= came <= 1.02 * expected + 2 * tail, (came, expected)


@pytest.mark.parametrize("breaks_at", [-1, 0, 1, "last"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_ring_that_breaks_leaves_nobody_waiting(breaks_at: Any, backwards: int) -> None:
    """Rank 0's ring breaks while that of rank 1 goes on: all backwards return, and the next step is as ever."""
    with World(2, 2) as world:
        held = models(world, bucket_cap_mb=SMALL_BUCKETS)
        buckets = len(held[world.members[0]].gradient_reducer.plan.buckets)
        at = buckets - 1 if breaks_at == "last" else breaks_at
        at += buckets * (backwards - 1) if at >= 0 else 0

        def break_one(member: Member) -> Any:
            attempt = member.start_quorum(breaks_at=at if member.number == 0 else None)
            for _ in range(backwards):
                held[member](batch(member.number)).square().mean().backward()
            held[member].gradient_reducer.flush()
            return attempt

        attempts = world.run(break_one)
        for member, attempt in zip(world.members, attempts, strict=True):
            assert bool(attempt.errors) == (member.rank == 0)
            held[member].gradient_reducer.vetoed()

        def go_on(member: Member) -> list[Any]:
            if member.rank == 0:
                member.form()
            found: list[Any] = stepping(held, Member.start_quorum, 1)(member)
            return found

        assert_equal_and_close(world.run(go_on), alone(range(4), [1] * 4, 1))


def test_a_backward_that_raises_on_one_rank_keeps_its_group_aligned() -> None:
    with World(2, 2) as world:
        held = models(world, bucket_cap_mb=SMALL_BUCKETS)

        def fail_one(member: Member) -> Any:
            attempt = member.start_quorum()
            loss = held[member](batch(member.number)).square().mean()
            if member.number == 0:
                next(iter(held[member].module[0].parameters())).register_hook(_refuse)
            try:
                loss.backward()
            except ZeroDivisionError:
                held[member].gradient_reducer.flush()
            held[member].gradient_reducer.vetoed()
            return attempt

        attempts = world.run(fail_one)
        assert [len(attempt.reports) for attempt in attempts] == [1, 0, 0, 0]
        assert not any(attempt.errors for attempt in attempts)


def _refuse(_: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("stage", ["exchange", "gather"])
def test_a_failure_inside_breaks_the_attempt_and_leaves_backward(stage: str) -> None:
    """A rank of group 0 is lost: both of its processes end. Those of group 1 return, and have its part or fail."""
    with World(2, 2) as world:
        held = models(world, bucket_cap_mb=SMALL_BUCKETS)
        for member in world.members[:2]:
            if not world.shared:
                setattr(member.inside, stage, _lost)
            elif stage == "exchange":
                member.inside.meet = _lost  # type: ignore[method-assign]
            else:
                buckets = len(held[member].gradient_reducer.plan.buckets)
                meet: Any = mock.Mock(wraps=member.inside.meet, side_effect=[mock.DEFAULT] * buckets + [_lost_rank()])
                member.inside.meet = meet  # type: ignore[method-assign]

        def one(member: Member) -> Any:
            attempt = member.start_quorum()
            loss = held[member](batch(member.number)).square().mean()
            with pytest.raises(RuntimeError, match="a rank was lost") if member.group == 0 else nullcontext():
                loss.backward()
            return attempt

        attempts = world.run(one)
        assert all(attempt.errors for attempt in attempts[:2])
        assert stage == "gather" or all(attempt.errors for attempt in attempts[2:])


def _lost_rank() -> RuntimeError:
    """Another one each time: it keeps the frames through which it was raised, and with them their process groups."""
    return RuntimeError("a rank was lost")


def _lost(*_: object) -> Any:
    raise _lost_rank()


def test_the_host_decides_by_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each step the fence, and the weights in the sum: it is told twice those, and divides by that."""
    reads: list[int] = []

    def read(_: RingAttempt, tensor: Tensor) -> Tensor:
        reads.append(tensor.numel())
        told = tensor.clone()
        if tensor.numel() != FENCE_SLOTS:
            told[-WEIGHT_DIGITS:] *= 2
        return told

    monkeypatch.setattr(RingAttempt, "read", read)
    with World(2, 2) as world:
        found = world.run(stepping(models(world, find_unused_parameters=False), Member.start_quorum))
        assert_equal_and_close(found, [gradient / 2 for gradient in alone(range(4), [1] * 4)])
        assert sorted(reads) == sorted([FENCE_SLOTS, WEIGHT_DIGITS] * 4)


def test_a_read_that_was_cut_short_breaks_the_ring_and_leaves_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: RingAttempt, tensor: Tensor) -> Tensor:
        if tensor.numel() == FENCE_SLOTS:
            return tensor
        raise RuntimeError("cut short")

    monkeypatch.setattr(RingAttempt, "read", read)
    with World(2, 2) as world:
        world.run(stepping(models(world), Member.start_quorum))
        attempts = [member.attempt for member in world.members]
        assert [[str(error) for error in attempt.errors] for attempt in attempts] == [["cut short"]] * 4  # type: ignore[union-attr]


def test_parameters_that_some_ranks_do_not_use() -> None:
    """`b` is used by one rank of one group, `c` by nobody."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(5, 1, bias=False) for _ in range(3))

        def forward(self, x: Tensor, with_b: bool) -> Tensor:
            found: Tensor = self.a(x) + self.b(x) if with_b else self.a(x)
            return found

    with World(2, 2) as world:

        def one(member: Member) -> list[Any]:
            model = member.wrap(Parts())
            member.start_quorum()
            model(torch.ones(1, 5), member.number == 2).sum().backward()
            return grads(model)

        for a, b, c in world.run(one):
            assert a.tolist() == [[1.0] * 5]
            assert b.tolist() == [[0.25] * 5]
            assert c is None


def test_accumulation_several_models_and_dtypes() -> None:
    with World(2, 2) as world:

        def one(member: Member) -> list[Any]:
            first, second = member.wrap(net(), bucket_cap_mb=SMALL_BUCKETS), member.wrap(net().double())
            member.start_quorum(rides=False)
            x = batch(member.number)
            with first.no_sync(), second.no_sync():
                (first(x).square().mean() + second(x.double()).square().mean()).backward()
            (first(x).square().mean() + second(x.double()).square().mean()).backward()
            found = [*grads(first), *(gradient.float() for gradient in grads(second))]
            for model in (first, second):
                model.gradient_reducer.committed()
                assert not model.gradient_reducer.unsettled
            return found

        expected = [2 * gradient for gradient in alone(range(4), [1] * 4)]
        found = world.run(one)
        assert_equal_and_close(found, [*expected, *expected])


@pytest.mark.parametrize("unused", ["a layer of the first", "the second", "the first", "one each"])
def test_several_models_of_which_the_ranks_use_different_parts(unused: str) -> None:
    """Gradients arrive in another order on each rank, or not at all; what the ranks send must not depend on it."""

    def loss(member: Member, first: Any, second: Any) -> Tensor:
        x, odd = batch(member.number), member.rank == 1
        skips_layer = odd and unused == "a layer of the first"
        skips_first = (odd and unused == "the first") or (not odd and unused == "one each")
        skips_second = odd and unused in ("the second", "one each")
        zero = torch.zeros((), requires_grad=True)
        one = zero if skips_first else first(x, not skips_layer).square().mean()
        return one + (zero if skips_second else 3 * second(x, True).square().mean())

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.deep = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            found: Tensor = self.wide(x) + self.deep(x) if both else self.wide(x)
            return found

    made = Two(), Two()
    expected = [torch.zeros_like(p) for model in made for p in model.parameters()]
    with World(2, 2) as world:
        for member in world.members:
            models = copy.deepcopy(made)
            loss(member, *models).backward()
            for total, parameter in zip(expected, [p for m in models for p in m.parameters()], strict=True):
                total += 0 if parameter.grad is None else parameter.grad / 4

        def one(member: Member) -> list[Any]:
            first, second = (member.wrap(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS) for model in made)
            found: list[Any] = []
            for _ in range(3):
                member.start_quorum(rides=False)
                for model in (first, second):
                    model.zero_grad()
                loss(member, first, second).backward()
                for model in (first, second):  # as the vote does
                    if not model.gradient_reducer.unsettled:
                        model.gradient_reducer.flush(with_accumulated=True)
                found = [*grads(first), *grads(second)]
                for model in (first, second):
                    model.gradient_reducer.committed()
            return found

        assert_equal_and_close(world.run(one), expected)


def test_buffers_follow_the_first_group_on_each_ring() -> None:
    with World(2, 2) as world:

        def one(member: Member) -> list[Any]:
            model = member.wrap(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
            member.start_quorum()
            model(batch(member.number)).square().mean().backward()
            mine = [buffer.clone() for buffer in model.buffers()]
            model.gradient_reducer.committed()
            return [mine, list(model.buffers())]

        found = world.run(one)
        for member, (_, now) in zip(world.members, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(now, found[member.rank][0], strict=True))


def test_a_group_of_one_rank_reduces_as_ever() -> None:
    with World(2, 1) as world:
        held = models(world)
        assert all(type(model.gradient_reducer).__name__ == "BucketReducer" for model in held.values())
        assert_equal_and_close(world.run(stepping(held, Member.start_quorum)), alone(range(2), [1] * 2))


def test_who_leaves_waits_for_nobody_of_its_group() -> None:
    """Group 1 leaves: one of its ranks after the other. Its zeros are in the step that group 0 makes."""
    with World(2, 2) as world:
        held = models(world, bucket_cap_mb=SMALL_BUCKETS)
        turn = threading.Event()

        def one(member: Member) -> Any:
            if member.group == 0:
                return stepping(held, Member.start_quorum)(member)
            if member.rank == 1:
                assert turn.wait(TIMEOUT_S)
            member.start_quorum(weight=0).leaves = True
            reducer = held[member].gradient_reducer
            reducer.flush()
            turn.set()
            return []

        found = world.run(one)
        assert_equal_and_close(found[:2], alone(range(2), [1, 1]))
        assert all(member.attempt.verdict for member in world.members)  # type: ignore[union-attr]


def test_who_leaves_in_the_middle_of_a_reduction_breaks_its_ring() -> None:
    with World(2, 2) as world:
        held = models(world, bucket_cap_mb=SMALL_BUCKETS)

        def one(member: Member) -> Any:
            attempt = member.start_quorum()
            reducer = held[member].gradient_reducer
            if member.group == 0:
                loss = held[member](batch(member.number)).square().mean()
                held[member].module[2].weight.register_hook(_refuse)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                last = member.start_quorum()
                last.leaves = True
                reducer.flush()
                return last
            held[member](batch(member.number)).square().mean().backward()
            return attempt

        assert all(attempt.errors for attempt in world.run(one))
