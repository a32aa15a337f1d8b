"""What torch's documentation of `Join` shows: loops without zero_grad, members of the script's own, ZeRO."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ft_core import DistributedDataParallel, OptimizerWrapper
from ft_core.errors import ConfigError, UsageError
from tests.runtime.harness import Cluster, Replica, crash
from tests.runtime.interleavings import once_launched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

with warnings.catch_warnings():  # torch's own package of these still scripts functions as it is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

RATE = 0.125


def one_weight() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


class Counter(Joinable):
    """The one of torch's tutorial, over the group of the model."""

    def __init__(self, model: Any, *, reduces: bool) -> None:
        super().__init__()
        self.group, self.reduces = model.join_process_group, reduces
        self.device: torch.device = model.join_device
        self.count, self.main_hooks, self.last = torch.zeros(1), 0, [False][:0]
        self.told: dict[str, Any] = {}

    def __call__(self) -> None:
        Join.notify_join_context(self)
        one = torch.ones(1)
        if self.reduces:
            dist.all_reduce(one, group=self.group)
        self.count += one

    def join_hook(self, **told: Any) -> JoinHook:
        counter, self.told = self, told

        class Hook(JoinHook):
            def main_hook(self) -> None:
                counter.main_hooks += 1

            def post_hook(self, is_last_joiner: bool) -> None:
                counter.last.append(is_last_joiner)

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.group


class Documented(Replica):
    """Runs `body(self)`; the weight in the end is `end`."""

    def __init__(self, index: int, inputs: int, body: Callable[[Documented], object], **more: Any) -> None:
        super().__init__(index, loop=self._go, **{"build": one_weight, "optim": plain} | more)
        self.inputs, self.body = inputs, body
        self.told: object = None
        self.end = (0, 0.0)

    def _go(self, _: Replica) -> None:
        self.told = self.body(self)
        self.end = (self.manager.current_step(), round(self.model.get_parameter("weight").item() / RATE, 4))

    def batches(self) -> Iterator[torch.Tensor]:
        for _ in range(self.inputs):
            self.step = self.manager.current_step()
            self.at("boundary")
            yield torch.ones(1)

    def train_as_printed(self, *, members: str = "mo", **options: Any) -> str:
        """torch's example; its gradients add up, because it never calls zero_grad."""
        known: dict[str, Any] = {"m": self.ddp, "o": self.optimizer}
        try:
            with Join([known[letter] for letter in members], **options):
                for batch in self.batches():
                    loss = self.ddp(batch).sum()
                    loss.backward()
                    self.optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""


def run(cluster: Cluster, body: Callable[[Documented], object], *inputs: int) -> list[Documented]:
    replicas = [Documented(index, count, body) for index, count in enumerate(inputs)]
    cluster.run(*replicas)
    cluster.check()
    return replicas


@pytest.fixture(params=[False, True], ids=["no default group", "a default group"])
def default_group(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param:
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield request.param
    if request.param:
        dist.destroy_process_group()


@pytest.mark.parametrize("members", ["mo", "om", "m"])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_the_documented_loop_never_calls_zero_grad(cluster: Cluster, members: str, extra: int) -> None:
    replicas = run(cluster, lambda replica: replica.train_as_printed(members=members), 4, 4 + extra, 4)
    steps = 4 + extra
    assert [r.told for r in replicas] == [""] * 3
    assert {r.end for r in replicas} == {(steps, -steps * (steps + 1) / 2)}, "1, then 1 + 1, then 1 + 1 + 1, ..."


def test_a_death_in_the_documented_loop(cluster: Cluster) -> None:
    """The others wait for it in the fence of a step: the batch of the one that trains is lost with that attempt."""
    others = [Documented(0, 3, Documented.train_as_printed), Documented(2, 7, Documented.train_as_printed)]
    dies = {(5, "boundary"): once_launched(others, 5, crash)}
    cluster.run(others[0], Documented(1, 9, Documented.train_as_printed, at=dies), others[1])
    cluster.check()
    assert others[0].end == others[1].end
    assert others[0].end[0] == 6


@pytest.mark.parametrize("members", ["mo", "om"])
def test_zero_grad_at_the_end_of_the_loop(cluster: Cluster, members: str) -> None:
    def body(replica: Documented) -> None:
        known: dict[str, Any] = {"m": replica.ddp, "o": replica.optimizer}
        with Join([known[letter] for letter in members]):
            for batch in replica.batches():
                replica.ddp(batch).sum().backward()
                replica.optimizer.step()
                replica.optimizer.zero_grad()

    replicas = run(cluster, body, 3, 5, 4)
    assert {r.end for r in replicas} == {(5, -5.0)}


@pytest.mark.parametrize("members", ["mo", "om", "m"])
def test_early_termination_names_a_rank(cluster: Cluster, members: str, default_group: bool) -> None:
    throw = {"throw_on_early_termination": True}
    replicas = run(cluster, lambda replica: replica.train_as_printed(members=members, **throw), 2, 4, 6)
    assert replicas[0].told == "Rank 0 exhausted all inputs."
    told = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    assert [r.told for r in replicas[1:]] == [told, told]
    assert len({r.end for r in replicas}) == 1


def test_after_the_context_forward_opens_no_step(cluster: Cluster) -> None:
    def body(replica: Documented) -> bool:
        replica.train_as_printed()
        replica.ddp(torch.ones(1))
        return replica.manager.step_open

    assert [r.told for r in run(cluster, body, 2, 3)] == [False, False]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("throw", [False, True])
def test_a_member_of_the_scripts_own(cluster: Cluster, first: bool, throw: bool) -> None:
    def body(replica: Documented) -> tuple[object, ...]:
        counter = Counter(replica.ddp, reduces=False)
        members: list[Any] = [replica.ddp, replica.optimizer]
        members.insert(0 if first else 2, counter)
        ends = pytest.raises(RuntimeError, match="exhausted") if throw else contextlib.nullcontext()
        with ends, Join(members, throw_on_early_termination=throw, sync_max_count=True):
            for batch in replica.batches():
                counter()
                replica.optimizer.zero_grad()
                replica.ddp(batch).sum().backward()
                replica.optimizer.step()
        return int(counter.count), counter.main_hooks, counter.last, counter.told

    replicas = run(cluster, body, 2, 5)
    told = {"sync_max_count": True}
    if not throw:
        assert [r.told for r in replicas] == [(2, 3, [False], told), (5, 0, [True], told)]
        assert {r.end for r in replicas} == {(5, -5.0)}
    else:
        assert [r.told for r in replicas] == [(2, 0, [], told), (3 if first else 4, 0, [], told)]
        assert {r.end for r in replicas} == {(3, -3.0)}


@pytest.mark.parametrize("where", ["in the loop", "in a hook"])
def test_a_member_that_reduces_is_refused(cluster: Cluster, default_group: bool, where: str) -> None:
    def body(replica: Documented) -> str:
        counter = Counter(replica.ddp, reduces=where == "in the loop")
        if where == "in a hook":
            hook = JoinHook()
            hook.post_hook = lambda is_last_joiner: dist.all_reduce(counter.count, group=counter.group)  # type: ignore[method-assign]
            counter.join_hook = lambda **_: hook  # type: ignore[method-assign]

        def loop() -> None:
            with Join([replica.ddp, replica.optimizer, counter]):  # type: ignore[list-item]
                for batch in replica.batches():
                    replica.optimizer.zero_grad()
                    replica.ddp(batch).sum().backward()
                    replica.optimizer.step()
                    counter()

        with pytest.raises(UsageError, match=r"over the group of a Join context .* manager.batches_committed"):
            loop()
        return "refused"

    inputs = (2, 2) if where == "in the loop" else (2, 3)
    assert [r.told for r in run(cluster, body, *inputs)] == ["refused"] * 2


def test_zero_inside_our_optimizer(cluster: Cluster) -> None:
    """It shards over the ranks of this replica group; whether a step is applied is decided by all groups."""

    def shards(model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=RATE)

    class Sharded(Documented):
        def state_dict(self) -> dict[str, Any]:
            return {"model": self.model.state_dict(), "optim": self.inner.optim.state_dict()}  # type: ignore[attr-defined]

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])
            self.inner.optim.load_state_dict(state["optim"])  # type: ignore[attr-defined]

    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        replicas = [Sharded(i, n, Documented.train_as_printed, optim=shards) for i, n in enumerate((3, 5))]
        cluster.run(*replicas)
        cluster.check()
    finally:
        dist.destroy_process_group()
    assert {r.end[0] for r in replicas} == {5}
    assert len({r.end for r in replicas}) == 1
    assert replicas[0].end[1] != 0.0


@pytest.mark.parametrize("order", [1, -1])
def test_zero_beside_our_model_is_refused_with_the_reason(cluster: Cluster, default_group: bool, order: int) -> None:
    class OfOneRank(Joinable):
        """What ZeRO is to Join: a member with another group."""

        def __init__(self) -> None:
            super().__init__()

        def join_hook(self, **_: Any) -> JoinHook:
            return JoinHook()

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return dist.group.WORLD

    def body(replica: Documented) -> None:
        members = [replica.ddp, OfOneRank()][::order]
        if default_group:
            members = [ZeroRedundancyOptimizer(replica.model.parameters(), torch.optim.SGD, lr=1), replica.ddp][::order]
        elif order < 0:
            return  # without a group it has none that differs
        with pytest.raises(ConfigError, match=r"ZeroRedundancyOptimizer belongs into ft_core.Optimizer"):
            Join(members)  # type: ignore[arg-type]

    run(cluster, body, 0)


def test_zero_over_the_group_of_the_context_is_refused(cluster: Cluster, default_group: bool) -> None:
    def body(replica: Documented) -> None:
        group: Any = replica.ddp.join_process_group
        with pytest.raises(UsageError, match="no ranks that stay the same"):
            ZeroRedundancyOptimizer(replica.model.parameters(), torch.optim.SGD, process_group=group, lr=1)

    run(cluster, body, 0)


def test_two_managers_models_do_not_share_a_context(cluster: Cluster) -> None:
    first, second = Documented(0, 0, lambda _: None), Documented(1, 0, lambda _: None)
    cluster.run(first, second)
    assert isinstance(first.ddp, DistributedDataParallel)
    assert isinstance(second.optimizer, OptimizerWrapper)
    with pytest.raises(ConfigError, match=r"JoinGroup.* is the join_process_group of another member"):
        Join([first.ddp, second.optimizer])
