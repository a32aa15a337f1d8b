"""Weighted averaging: every committed step is that of one process on the concatenated batch of all replicas."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ft_core import DistributedDataParallel
from ft_core.errors import ConfigError, UsageError
from ft_core.protocol.rank.ballot import MAX_WEIGHT
from ft_core.reduction.batch_weights import BatchWeights, refuse_unequal, unweigh_inputs, weigh_outputs
from tests.runtime.harness import CLASSES, FEATURES, Cluster, Replica, adamw, crash, mlp, sgd, soft_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.runtime.harness import Action

Sizes = list[int]


def samples(replica: int, step: int, micro: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * replica + 100 * step + micro)
    return torch.randn(size, FEATURES, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


class Weighing(Replica):
    """Makes micro-batches of the sizes that `plan(index, step)` says; the last one's backward reduces."""

    def __init__(self, index: int, plan: Callable[[int, int], Sizes], *, says: bool = True, **more: Any) -> None:
        super().__init__(index, **{"optim": sgd} | more)
        self.plan, self.says = plan, says
        self.norms: dict[int, float] = {}

    def part(self, step: int, micro: int, size: int) -> Tensor:
        x, y = samples(self.index, step, micro, max(1, size))  # one of weight 0 is computed on something
        if self.says:
            self.manager.set_batch_weight(size)
        loss = nn.functional.cross_entropy(self.ddp(x), y)
        return loss if size else loss * float("nan")

    def loss(self) -> Tensor:
        step = self.manager.current_step()
        *first, last = list(enumerate(self.plan(self.index, step)))
        for micro, size in first:
            with self.ddp.no_sync():  # type: ignore[operator]
                self.part(step, micro, size).backward()
        return self.part(step, *last)

    def at(self, point: str) -> None:
        if point == "backward" and self.manager.errored() is None:  # what a script clips
            total = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
            self.norms[self.manager.current_step()] = float(total.norm())
        super().at(point)


def check(cluster: Cluster, optim: Any = sgd, build: Callable[[], nn.Module] = mlp) -> None:
    """The parameters are those of one process on the concatenated batches of each step's contributors."""
    contributors, by_index = cluster.contributors(), {r.index: r for r in cluster.replicas}
    ends = [r for r in cluster.replicas if r.commits and r.commits[-1].step == max(contributors)]
    clipped = ends[0].norms if isinstance(ends[0], Weighing) else {}
    for source in cluster.replicas:
        torch.manual_seed(source.seed)
        model = build()
        optimizer = optim(model)
        norms = {}
        for step in range(1, max(contributors) + 1):
            parts = []
            for index in sorted(contributors[step]):
                replica = by_index[index]
                assert isinstance(replica, Weighing)
                sizes = enumerate(replica.plan(index, step - 1))
                parts += [samples(index, step - 1, micro, size) for micro, size in sizes if size]
            optimizer.zero_grad()
            x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
            nn.functional.cross_entropy(model(x), y).backward()
            norms[step - 1] = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())  # type: ignore[union-attr]
            optimizer.step()
        got = ends[0].model.state_dict()
        if all(torch.allclose(got[k], v, atol=1e-5) for k, v in model.state_dict().items()):
            for step in clipped.keys() & norms.keys():
                if ends[0].index in contributors[step + 1]:
                    assert clipped[step] == pytest.approx(norms[step], rel=1e-4), "right before the vote, for clipping"
            return
    raise AssertionError("the parameters are not those of a single process")


def uneven(index: int, step: int) -> Sizes:
    return [1 + (3 * index + 5 * step) % 7]


def accumulated(index: int, step: int) -> Sizes:
    return [[4, 2, 3], [5, 5], [1], [2, 6, 1, 1]][(index + step) % 4]


def with_empty_ones(index: int, step: int) -> Sizes:
    """Fillers in front, between and last, and replicas that have nothing at all in a step."""
    return [[0, 3, 2], [4, 0, 1], [2, 5, 0], [0], [0, 0], [3]][(index + step) % 6]


@pytest.mark.parametrize("plan", [uneven, accumulated, with_empty_ones])
@pytest.mark.parametrize("optim", [sgd, adamw])
def test_as_one_process_on_all_samples(cluster: Cluster, plan: Callable[[int, int], Sizes], optim: Any) -> None:
    cluster.run(*[Weighing(index, plan, optim=optim, seed=7) for index in range(3)])
    cluster.check(steps=6)
    for replica in cluster.replicas:  # a replica without samples in a step contributes nothing to it
        replica.commits = [
            type(c)(c.step, c.quorum_id, c.digest, bool(sum(plan(replica.index, c.step - 1))), c.batches)
            for c in replica.commits
        ]
    check(cluster, optim)


def test_a_replica_that_says_nothing_counts_as_one(cluster: Cluster) -> None:
    cluster.run(Weighing(0, uneven), Weighing(1, lambda *_: [1], says=False), Weighing(2, accumulated))
    cluster.check(steps=6)
    check(cluster)


@pytest.mark.parametrize(("point", "action"), [("forward", crash), ("backward", crash), ("forward", soft_error)])
def test_with_faults(cluster: Cluster, point: str, action: Action) -> None:
    replicas = [Weighing(index, accumulated) for index in range(3)]
    replicas[1].actions[3, point] = action
    cluster.run(*replicas)
    cluster.check(steps=6, survivors=2 if action is crash else 3)
    check(cluster)


def loses_its_ring(replica: Replica) -> None:
    replica.manager._runtime.shell.fail(OSError("lost"))


def test_with_a_newcomer_and_one_that_fell_behind(cluster: Cluster) -> None:
    late = Weighing(2, uneven)
    behind = Weighing(1, accumulated, steps=8, at={(4, "backward"): loses_its_ring})
    cluster.run(Weighing(0, accumulated, steps=8, at={(2, "boundary"): cluster.joins(late)}), behind)
    late.steps = 8
    cluster.check()
    check(cluster)


def test_several_reduced_backwards_in_one_step(cluster: Cluster) -> None:
    """Each is a round with a fence of its own; weights add up over them."""

    class Rounds(Weighing):
        def loss(self) -> Tensor:
            step = self.manager.current_step()
            *first, last = list(enumerate(self.plan(self.index, step)))
            for micro, size in first:
                self.part(step, micro, size).backward()
            return self.part(step, *last)

    plan = lambda index, step: [2 + index, 1 + (index + step) % 3, 4]  # noqa: E731
    cluster.run(*[Rounds(index, plan) for index in range(3)])
    cluster.check(steps=6)
    check(cluster)


def test_two_wrapped_modules(cluster: Cluster) -> None:
    """One feeds the other, each weighs for itself. The fence rides on neither: gradients are right after the vote."""

    class Two(Weighing):
        def wrap(self) -> None:
            super().wrap()
            self.ddp.unwrap()  # type: ignore[operator]
            self.parts = [DistributedDataParallel(self.manager, part) for part in self.model.children()]
            self.ddp = Both(*self.parts)

        def at(self, point: str) -> None:
            Replica.at(self, point)

    class Both(nn.Sequential):
        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for part in self.children():
                    assert isinstance(part, DistributedDataParallel)
                    stack.enter_context(part.no_sync())
                yield

    cluster.run(*[Two(index, accumulated, build=two_layers, seed=2) for index in range(2)])
    cluster.check(steps=6)
    check(cluster, build=two_layers)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES))


def test_what_the_user_averages_counts_for_the_whole_step(cluster: Cluster) -> None:
    averages: list[float] = []

    class Manual(Replica):
        def iteration(self) -> None:
            self.manager.start_quorum()
            for size in [[4, 2], [1], [0]][self.index]:
                self.manager.set_batch_weight(size)
            value = torch.tensor([[1.0], [8.0], [100.0]][self.index])
            self.manager.allreduce(value).wait()
            assert self.manager.should_commit()
            averages.append(value.item())

    cluster.run(*[Manual(index, steps=1) for index in range(3)])
    cluster.check()
    assert averages == [pytest.approx(2.0)] * 3


@dataclass
class Output:
    """What models of a well-known library return: the loss was computed from the logits."""

    loss: Tensor
    logits: Tensor
    name: str = "x"


class WithLoss(nn.Module):
    """Weighs tokens: the loss is the mean over those that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Output:
        logits = self.net(x)
        return Output(nn.functional.cross_entropy(logits, y), logits)


def test_a_loss_inside_the_module_is_weighed_once(cluster: Cluster) -> None:
    class Tokens(Weighing):
        def part(self, step: int, micro: int, size: int) -> Tensor:
            x, y = samples(self.index, step, micro, size)
            padded, ignored = torch.cat([x, torch.ones(2, FEATURES)]), torch.cat([y, torch.full((2,), -100)])
            self.manager.set_batch_weight(size)
            loss: Tensor = self.ddp(padded, ignored).loss
            return loss

    class Reference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    cluster.run(*[Tokens(index, accumulated, build=WithLoss, seed=3) for index in range(2)])
    cluster.check(steps=6)
    check(cluster, build=Reference)


def test_weights_belong_to_one_step(cluster: Cluster) -> None:
    def skips_votes(replica: Replica) -> None:
        assert isinstance(replica, Weighing)
        step = replica.manager._runtime.rank
        replica.optimizer.zero_grad()
        replica.loss().backward()
        assert step.attempt.weight == 9
        replica.optimizer.zero_grad()
        assert step.attempt.weight is None, "what was reduced without a vote is void"
        replica.loss().backward()
        assert step.attempt.weight == 9
        assert replica.manager.should_commit()
        assert step.attempt.weight is None
        replica.manager.set_batch_weight(4)  # also before the step begins
        replica.optimizer.zero_grad()
        assert step.attempt.weight == 4
        replica.manager.set_batch_weight(0)
        assert step.attempt.weight == 4

    cluster.run(Weighing(0, lambda *_: [4, 2, 3], loop=skips_votes))
    cluster.check()


def test_after_a_reduction_without_samples_there_may_be_none_in_the_same_step(cluster: Cluster) -> None:
    def late(replica: Replica) -> None:
        replica.optimizer.zero_grad()
        replica.manager.set_batch_weight(0)
        replica.loss().backward()
        with pytest.raises(UsageError, match=r"all but the last backward of a step under no_sync\(\)"):
            replica.manager.set_batch_weight(3)

    cluster.run(Replica(0, loop=late))
    cluster.check()


def test_bad_weights(cluster: Cluster) -> None:
    def mistakes(replica: Replica) -> None:
        manager = replica.manager
        for bad in (-1, 1.5, float("nan"), float("inf"), 4.0, "4", None, True, torch.tensor(2)):
            with pytest.raises(ConfigError, match="must be the number of samples or tokens"):
                manager.set_batch_weight(bad)  # type: ignore[arg-type]
        manager.set_batch_weight(MAX_WEIGHT - 1)
        with pytest.raises(ConfigError, match="may add up to 4294967295, these to 4294967296; use a larger unit"):
            manager.set_batch_weight(2)
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        with pytest.raises(UsageError, match="after an allreduce of the same step"):
            manager.set_batch_weight(1)
        assert manager.should_commit()
        manager.set_batch_weight(np.int64(4))
        assert manager._runtime.rank.attempt.weight == 4

    cluster.run(Replica(0, loop=mistakes))
    cluster.check()


def test_the_weights_of_an_attempt() -> None:
    weights = BatchWeights()
    assert (weights.ratio, weights.total) == (1.0, None)
    ratios = []
    for number in (0, 4, 2, 0, 8):
        weights.add(number)
        ratios.append(weights.ratio)
    assert ratios == [0.0, 1.0, 0.5, 0.0, 2.0]
    assert repr(weights) == "BatchWeights(total=14, current=8, reference=4)"
    weights.reset()
    assert (weights.ratio, weights.total) == (1.0, None)


def test_outputs_are_weighed_wherever_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    (kept,) = torch.autograd.grad(weigh_outputs(unweigh_inputs({"x": [x]}, 0.5)["x"][0] * 3, 0.5).sum(), x)
    assert kept.tolist() == [3.0, 3.0], "what goes on into other modules is not weighed"
    assert unweigh_inputs(x, 0.0) is x
    output = {"a": x * 1, "b": [Output((x * 2).sum(), x * 3), 5], "c": torch.ones(1)}
    weighed = weigh_outputs(output, 0.5)
    (weighed["a"].sum() + weighed["b"][0].loss + weighed["b"][0].logits.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    assert weighed["b"][0].name == "x"
    assert output["b"][0].loss is not weighed["b"][0].loss
    (grad,) = torch.autograd.grad(weigh_outputs(x * 1, 0.0).sum() * float("nan"), x)
    assert grad.tolist() == [0.0, 0.0]
    with pytest.raises(UsageError, match="a NoTensors, shows no tensor to weigh"):
        weigh_outputs(NoTensors(), 0.5)


class NoTensors:
    """An output that hides its tensors."""


def test_weights_that_must_be_equal() -> None:
    with pytest.raises(UsageError, match=r"those of this group have set 3, 1 \(1: or none\)"):
        refuse_unequal((3, 1))
