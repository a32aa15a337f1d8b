"""torch's `Join` over our wrappers: uneven inputs, in both orders of the members, with faults, and what it refuses."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.algorithms.join import Join, JoinHook

from ft_core import OptimizerWrapper
from ft_core.errors import ConfigError, QuorumTimeoutError
from ft_core.join import JoinMember, joining_of
from tests.runtime.harness import Cluster, Replica, crash, crash_seen, sgd, with_batch_norm
from tests.runtime.interleavings import once_held, once_launched

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.loopback import Loopback


class Probe(JoinMember):
    """A third member of the context, which looks on."""

    def __init__(self, manager: object) -> None:
        super().__init__()
        self.manager = manager
        self.main_hooks = 0
        self.last: bool | None = None

    def join_hook(self, **_: Any) -> JoinHook:
        probe = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                probe.main_hooks += 1

            def post_hook(self, is_last_joiner: bool) -> None:
                probe.last = is_last_joiner

        joining_of(self.manager).add(self)
        return Hook()

    def _join_manager(self) -> object:
        return self.manager


class Joined(Replica):
    """Goes through `inputs` batches inside a Join context."""

    def __init__(self, index: int, inputs: int, *, members: str = "mo", join: Any = None, **more: Any) -> None:
        super().__init__(index, steps=100, **{"optim": sgd} | more)
        self.inputs, self.members, self.join_options = inputs, members, join or {}
        self.shadowed = 0
        self.raised: BaseException | None = None
        self.end = (0, "")
        self.probe: Probe

    def make_context(self) -> Join:
        """A context whose members are `members`; what is applied inside it is recorded as a commit."""
        apply = self.optimizer._apply

        def counted() -> None:
            self.step = self.manager.current_step()
            self.at("shadowing")
            apply()
            self.record(True, False)
            self.shadowed += 1
            self.at("shadowed")

        self.probe = Probe(self.manager)
        self.optimizer._apply = counted  # type: ignore[method-assign]  # what the hook takes
        try:
            known: dict[str, Any] = {"m": self.ddp, "o": self.optimizer}
            return Join([*[known[letter] for letter in self.members], self.probe], **self.join_options)
        finally:
            self.optimizer._apply = apply  # type: ignore[method-assign]

    def train(self) -> None:
        try:
            with self.make_context():
                for _ in range(self.inputs):
                    self.iteration()
        except RuntimeError as error:
            self.raised = error
        self.end = (self.manager.state_dict()["step"], self.digest())


def one_end(cluster: Cluster) -> tuple[int, str]:
    ends = {r.end for r in cluster.replicas if isinstance(r, Joined) and not r.crashed}
    assert len(ends) == 1, [(r, getattr(r, "end", None)) for r in cluster.replicas]
    return ends.pop()


@pytest.mark.parametrize("members", ["mo", "om"])
@pytest.mark.parametrize("extra", [0, 1, 4])
def test_the_documented_example(cluster: Cluster, members: str, extra: int) -> None:
    replicas = [Joined(0, 3, members=members), Joined(1, 3 + extra, members=members), Joined(2, 3, members=members)]
    cluster.run(*replicas)
    cluster.check()
    assert one_end(cluster)[0] == 3 + extra
    assert [r.shadowed for r in replicas] == [extra, 0, extra]
    assert [r.probe.last for r in replicas] == [extra == 0, True, extra == 0]
    assert [r.probe.main_hooks for r in replicas] == [extra, 0, extra]
    cluster.check_numbers(optim=sgd)


@pytest.mark.parametrize("extra", [0, 1, 4])
def test_without_the_optimizer_who_joined_is_healed_in_the_end(cluster: Cluster, extra: int) -> None:
    replicas = [Joined(0, 3, members="m"), Joined(1, 3 + extra, members="m"), Joined(2, 3, members="m")]
    cluster.run(*replicas)
    cluster.check()
    assert one_end(cluster)[0] == 3 + extra
    assert len(replicas[0].commits) == 3
    cluster.check_numbers(optim=sgd)


@pytest.mark.parametrize("members", ["mo", "m"])
@pytest.mark.parametrize("when", ["forward", "backward", "stepped"])
def test_a_death_while_others_have_joined(cluster: Cluster, members: str, when: str) -> None:
    """The others wait for it in the fence of a step: the batch of the one that trains is lost with that attempt."""
    first, last = Joined(0, 2, members=members), Joined(2, 6, members=members)
    lost = 4 if when == "forward" else 5
    dies = once_launched([first, last], lost, crash)
    cluster.run(first, Joined(1, 9, members=members, at={(4, when): dies}), last)
    cluster.check()
    assert last.vetoes == [lost]
    assert one_end(cluster)[0] == 5
    cluster.check_numbers(optim=sgd)


@pytest.mark.parametrize("when", ["shadowing", "shadowed"])
def test_the_death_of_a_replica_that_has_joined(cluster: Cluster, when: str) -> None:
    """The step it applies is committed: the others wait for it in the next one, and lose a batch each."""
    others = [Joined(1, 7), Joined(2, 5)]
    cluster.run(Joined(0, 2, at={(4, when): once_launched(others, 4, crash)}), *others)
    cluster.check()
    assert [r.vetoes for r in others] == [[4], [4]]
    assert one_end(cluster)[0] == 6
    cluster.check_numbers(optim=sgd)


def test_the_last_that_trains_dies_and_nothing_is_lost_that_another_holds(cluster: Cluster) -> None:
    joined = Joined(0, 2)
    cluster.run(joined, Joined(1, 9, at={(6, "boundary"): once_held([joined], 6, crash_seen)}))
    cluster.check()
    assert one_end(cluster)[0] == 6, "the joined replica has every commit"


def test_who_joined_without_the_optimizer_keeps_what_it_had_when_the_last_that_trains_dies(cluster: Cluster) -> None:
    trailing = Joined(0, 2, members="m")
    cluster.run(trailing, Joined(1, 9, members="m", at={(6, "boundary"): crash_seen}))
    assert [c.step for c in trailing.commits] == [1, 2]
    assert trailing.end[0] == 2


@pytest.mark.parametrize("members", ["mo", "m"])
def test_a_newcomer_while_others_have_joined(cluster: Cluster, members: str) -> None:
    late = Joined(2, 4, members=members)
    cluster.run(Joined(0, 2, members=members), Joined(1, 9, members=members, at={(4, "boundary"): cluster.joins(late)}))
    cluster.check()
    assert late.commits[0].step > 4
    assert late.vetoes == [0], "it warms up with its first batch"
    assert one_end(cluster)[0] == max(9, late.commits[0].step + 2), "three are left"
    cluster.check_numbers(optim=sgd)


def test_all_are_there_again_in_the_next_context(cluster: Cluster) -> None:
    class Epochs(Joined):
        def train(self) -> None:
            for inputs in (3, 1 + self.index, 4 - self.index, 0 if self.index else 2):
                self.inputs = inputs
                super().train()

    replicas = [Epochs(index, 0) for index in range(3)]
    cluster.run(*replicas)
    cluster.check()
    assert one_end(cluster)[0] == 3 + 3 + 4 + 2
    cluster.check_numbers(optim=sgd)


@pytest.mark.parametrize("members", ["mo", "om", "m"])
def test_early_termination_is_thrown_everywhere(cluster: Cluster, members: str) -> None:
    throw = {"throw_on_early_termination": True}
    replicas = [Joined(index, 3 + 2 * index, members=members, join=throw) for index in range(3)]
    cluster.run(*replicas)
    cluster.check()
    assert str(replicas[0].raised) == "Rank 0 exhausted all inputs."
    told = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    assert [str(r.raised) for r in replicas[1:]] == [told, told]
    assert one_end(cluster)[0] == (3 if members == "m" else 4)


def test_early_termination_is_thrown_by_all_that_have_joined(cluster: Cluster) -> None:
    """The second is through with its inputs when it learns that the first had one less."""
    throw = {"throw_on_early_termination": True}
    replicas = [Joined(index, 3 + index, join=throw) for index in range(2)]
    cluster.run(*replicas)
    assert [type(r.raised) for r in replicas] == [RuntimeError, RuntimeError]
    assert one_end(cluster)[0] == 4


def test_no_early_termination_where_inputs_are_even(cluster: Cluster) -> None:
    throw = {"throw_on_early_termination": True}
    replicas = [Joined(index, 3, join=throw) for index in range(3)]
    cluster.run(*replicas)
    cluster.check(steps=3)
    assert [r.raised for r in replicas] == [None] * 3
    assert [r.probe.last for r in replicas] == [True] * 3


def test_a_failure_comes_out_of_the_context(cluster: Cluster) -> None:
    """There is no quorum any more: with torch's default group initialized or not, the error says why."""
    short: Any = {"min_replica_size": 2, "quorum_timeout": timedelta(seconds=0.3)}
    replicas = [Joined(0, 2, **short), Joined(1, 9, at={(4, "boundary"): crash}, **short)]
    cluster.run(*replicas)
    assert isinstance(replicas[0].raised, QuorumTimeoutError)
    assert replicas[0].end[0] == 4


def test_disabled_it_does_nothing(cluster: Cluster) -> None:
    replicas = [Joined(index, 3, join={"enable": False}) for index in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=3)
    assert [r.probe.last for r in replicas] == [None] * 2


def test_no_sync_inside(cluster: Cluster) -> None:
    class Accumulating(Joined):
        def loss(self) -> torch.Tensor:
            ddp: Any = self.ddp
            with ddp.no_sync():
                (super().loss() / 2).backward()
            return super().loss() / 2  # the same batch twice: the gradient is that of once

    cluster.run(Accumulating(0, 3), Accumulating(1, 5))
    cluster.check()
    assert one_end(cluster)[0] == 5
    cluster.check_numbers(optim=sgd)


def test_running_statistics_go_on_when_their_source_has_joined(cluster: Cluster) -> None:
    replicas = [Joined(index, 2 + 2 * index, build=with_batch_norm) for index in range(3)]
    means: list[torch.Tensor] = []
    replicas[2].actions = {
        (step, "stepped"): lambda r: means.append(r.model.get_buffer("1.running_mean").clone()) for step in range(9)
    }
    cluster.run(*replicas)
    cluster.check()
    assert one_end(cluster)[0] == 6
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(means)]
    assert changed == [True, False, True, False, True], "one step of statistics is lost when the source joins"


def test_what_cannot_work(cluster: Cluster, lighthouse: Loopback) -> None:
    del lighthouse
    told: list[str] = []

    def mistakes(replica: Replica) -> None:
        calls: list[Callable[[], object]] = [
            lambda: Join([replica.ddp], divide_by_initial_world_size=True),  # type: ignore[list-item]
            lambda: Join([replica.optimizer, OptimizerWrapper(replica.manager, sgd(replica.model))]),
            lambda: Join([OptimizerWrapper(object(), sgd(replica.model))]),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(ConfigError) as raised:
                call()
            told.append(str(raised.value).split(":")[0])
        assert replica.ddp.join_device == torch.device("cpu")
        with replica.ddp.join(), replica.ddp.no_sync():  # type: ignore[operator]
            pass

    cluster.run(Replica(0, loop=mistakes))
    cluster.check()
    assert told == [
        "divide_by_initial_world_size=True is not possible here", "Join takes one OptimizerWrapper",
        "Join needs a model and an optimizer of a Manager, not of a object",
    ]  # fmt: skip
