"""Ways to train: buffers, accumulation, several models or none, uneven weights, mixed precision."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from ft_core import DistributedDataParallel, OptimizerWrapper, PureDistributedDataParallel
from ft_core.errors import UsageError
from ft_core.manager import WorldSizeMode
from ft_core.protocol.rank.phases import Phase
from tests.runtime.harness import (
    Cluster,
    Replica,
    batch_of,
    crash,
    digest_of,
    mlp,
    sgd,
    soft_error,
    with_batch_norm,
)
from tests.runtime.interleavings import once_launched

# ------------------------------------------------------------ buffers


def test_batch_norm_follows_the_first_participant(cluster: Cluster) -> None:
    cluster.run(*[Replica(i, build=with_batch_norm) for i in range(3)])
    cluster.check(steps=6)
    tracked = cluster.replicas[0].model.state_dict()["1.num_batches_tracked"]
    assert int(tracked) == 6


def test_batch_norm_after_veto_crash_and_heal(cluster: Cluster) -> None:
    again = Replica(9, name="r2", steps=10, build=with_batch_norm)
    replicas = [
        Replica(
            0, steps=10, build=with_batch_norm, at={(2, "forward"): soft_error, (6, "boundary"): cluster.joins(again)}
        ),
        Replica(1, steps=10, build=with_batch_norm),
        Replica(2, steps=10, build=with_batch_norm, at={(4, "forward"): crash}),
    ]
    cluster.run(*replicas)
    cluster.check(steps=10, survivors=3)
    assert int(replicas[0].model.state_dict()["1.num_batches_tracked"]) == 10  # not 11: the vetoed step left no trace


# ------------------------------------------------------------ a commit that one member could not follow


@pytest.mark.parametrize("build", [mlp, with_batch_norm])
def test_who_could_not_follow_a_commit_heals(cluster: Cluster, build: Any) -> None:
    class Counting(Replica):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, build=build, **options)
            self.loads: list[int] = []

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loads.append(self.step)
            super().load_state_dict(state)

    def loses_its_ring(replica: Replica) -> None:
        """Once the others have committed the step and launched the next one, which they lose."""
        others = [r.manager._runtime.rank for r in replica.cluster.replicas if r is not replica]
        cluster.lighthouse.wait_for(lambda: all(r.attempt.base.step == 4 and r.phase is Phase.REDUCING for r in others))
        replica.manager._runtime.shell.fail(OSError("injected: a connection broke"))

    replicas = [Counting(0), Counting(1, at={(3, "backward"): loses_its_ring}), Counting(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [r.vetoes for r in replicas] == [[4], [3], [4]]
    assert [[c.step for c in r.commits] for r in replicas] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert [[step for step in r.loads if step > 0] for r in replicas] == [[], [3], []]


# ------------------------------------------------------------ accumulation


def accumulate(no_sync: bool) -> Any:
    def loop(replica: Replica) -> None:
        manager, ddp = replica.manager, replica.ddp
        assert isinstance(ddp, DistributedDataParallel)
        while manager.current_step() < replica.steps:
            replica.step = manager.current_step()
            replica.optimizer.zero_grad()
            x, y = batch_of(replica.index, replica.step)
            for half in (slice(0, 2), slice(2, 4)):
                loss = nn.functional.cross_entropy(ddp(x[half]), y[half]) / 2
                if no_sync and half.start == 0:
                    with ddp.no_sync():
                        nn.functional.cross_entropy(ddp(x[half]), y[half]).div(2).backward()
                else:
                    loss.backward()
            if manager.is_participating():
                replica.offered.add(replica.step + 1)
            replica.at("backward")
            participated = manager.is_participating()
            replica.optimizer.step()
            replica.record(replica.optimizer.committed, participated)

    return loop


def test_accumulation_under_no_sync_equals_one_large_batch(cluster: Cluster) -> None:
    cluster.run(*[Replica(i, loop=accumulate(True), optim=sgd) for i in range(2)])
    cluster.check(steps=6)
    cluster.check_numbers(optim=sgd)


def test_accumulation_without_no_sync_is_the_same_on_all_replicas(cluster: Cluster) -> None:
    """Each backward is reduced; torch's DDP then averages what was averaged already, and so do we."""
    replicas = [Replica(i, loop=accumulate(False), optim=sgd) for i in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [r.vetoes for r in replicas] == [[], []]


# ------------------------------------------------------------ several models, or none


class Gan(Replica):
    """Two wrapped models on one Manager, two votes per quorum."""

    def wrap(self) -> None:
        with self.cluster.build_lock:
            torch.manual_seed(self.seed + 50)
            self.other = mlp()
        self.other_optim = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.ddp = DistributedDataParallel(self.manager, self.model)
        self.other_ddp = DistributedDataParallel(self.manager, self.other)
        self.outcomes: list[tuple[bool, bool]] = []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "other": self.other.state_dict(), "other_optim": self.other_optim.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.other.load_state_dict(state["other"])
        self.other_optim.load_state_dict(state["other_optim"])

    def digest(self) -> str:
        return digest_of(self.state_dict())

    def iteration(self) -> None:
        manager = self.manager
        self.step = manager.current_step()
        self.at("boundary")
        manager.start_quorum()
        x, y = batch_of(self.index, manager.current_step())
        votes = []
        for ddp, optim in ((self.ddp, self.inner), (self.other_ddp, self.other_optim)):
            for model in (self.model, self.other):
                model.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(ddp(x), y).backward()
            self.at("backward")
            participated = manager.is_participating()
            if participated:
                self.offered.add(manager.current_step() + 1)
            votes.append(manager.should_commit())
            if votes[-1]:
                optim.step()
            self.record(votes[-1], participated)
        self.outcomes.append((votes[0], votes[1]))


def test_two_models_and_two_votes_in_one_quorum(cluster: Cluster) -> None:
    again = Gan(2, steps=16)
    cluster.run(Gan(0, steps=16, at={(4, "boundary"): cluster.joins(again)}), Gan(1, steps=16), expected=2)
    cluster.check(steps=16)


class WrappedTwice(Replica):
    """As in a notebook whose cell is run again, or with a wrapper around a wrapper."""

    def wrap(self) -> None:
        first = DistributedDataParallel(self.manager, self.model)
        tied = nn.Sequential(mlp(), self.model)
        for again in (self.model, first, tied):
            with pytest.raises(UsageError, match=r"a parameter of shape .* is wrapped for this Manager already"):
                DistributedDataParallel(self.manager, again)
        self.model = first.unwrap()
        super().wrap()


def test_a_parameter_has_one_reducer(cluster: Cluster) -> None:
    """Two summed its gradient twice, or left none, and the steps were committed."""
    cluster.run(WrappedTwice(0), WrappedTwice(1))
    cluster.check()


def test_two_models_one_crash(cluster: Cluster) -> None:
    survivors = [Gan(0), Gan(1)]
    cluster.run(*survivors, Gan(2, at={(2, "backward"): crash}))
    cluster.check()
    assert survivors[0].outcomes[-1] == survivors[1].outcomes[-1] == (True, True)


class Manual(Replica):
    """No wrapper: the script reduces every gradient itself."""

    def wrap(self) -> None:
        self.ddp = self.model
        self.optimizer = OptimizerWrapper(self.manager, self.inner)

    def iteration(self) -> None:
        manager = self.manager
        self.step = manager.current_step()
        self.optimizer.zero_grad()
        self.at("started")
        self.loss().backward()
        works = [manager.allreduce(p.grad) for p in self.model.parameters() if p.grad is not None]
        for work in works:
            work.wait()
        participated = manager.is_participating()
        if participated:
            self.offered.add(manager.current_step() + 1)
        self.at("backward")
        self.optimizer.step()
        self.record(self.optimizer.committed, participated)


@pytest.mark.parametrize("point", ["started", "backward"])
def test_without_any_wrapper(cluster: Cluster, point: str) -> None:
    cluster.run(Manual(0, optim=sgd), Manual(1, optim=sgd), Manual(2, optim=sgd, at={(3, point): crash}))
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers(optim=sgd)


class Pure(Replica):
    def wrap(self) -> None:
        self.ddp = PureDistributedDataParallel(self.manager, self.model)
        self.optimizer = OptimizerWrapper(self.manager, self.inner)


def test_the_simple_wrapper(cluster: Cluster) -> None:
    cluster.run(
        Pure(0, optim=sgd),
        Pure(1, optim=sgd, at={(2, "forward"): soft_error}),
        Pure(2, optim=sgd, at={(3, "forward"): crash}),
    )
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers(optim=sgd)


# ------------------------------------------------------------ divisors


def test_the_divisor_follows_who_really_contributed(cluster: Cluster) -> None:
    """A participant that has no data puts in zeros: the sum is divided by one, not by two (R10)."""
    idle = Replica(1, optim=sgd)

    def no_data(replica: Replica) -> None:
        replica.manager._runtime.rank.data.exhausted = True

    idle.actions[2, "boundary"] = no_data
    cluster.run(Replica(0, optim=sgd), idle)
    cluster.check(steps=6)
    for replica in cluster.replicas:
        for index, commit in enumerate(replica.commits):
            if replica is idle and commit.step > 2:
                replica.commits[index] = type(commit)(
                    commit.step, commit.quorum_id, commit.digest, False, commit.batches
                )
    cluster.check_numbers(optim=sgd)


def test_weighted_gradients(cluster: Cluster) -> None:
    """Weights 1 and 3: the step is that of the weighted mean, also on a member that contributes nothing."""
    results: list[torch.Tensor] = []

    class Weighted(Manual):
        def iteration(self) -> None:
            self.manager._runtime.rank.attempt.weight = (1, 3, 5)[self.index]
            if self.index == 2:
                self.manager._runtime.rank.data.exhausted = True
            self.manager.start_quorum()
            value = torch.full((2,), float(self.index))
            self.manager.allreduce(value).wait()
            assert self.manager.should_commit()
            results.append(value)

    cluster.run(*[Weighted(i, steps=1) for i in range(3)])
    cluster.check()
    assert [v.tolist() for v in results] == [[0.75, 0.75]] * 3


def test_fixed_with_spares(cluster: Cluster) -> None:
    mode: dict[str, Any] = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}
    replicas = [Replica(i, optim=sgd, **mode) for i in range(3)]
    seen: dict[int, tuple[int, int | None]] = {}

    def look(replica: Replica) -> None:
        seen[replica.index] = (replica.manager.num_participants(), replica.manager.participating_rank())

    for replica in replicas:
        replica.actions[1, "forward"] = look
    replicas[0].actions[3, "forward"] = once_launched(replicas[1:], 3, crash)
    cluster.run(*replicas)
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers(optim=sgd)
    assert seen == {0: (2, 0), 1: (2, 1), 2: (2, None)}
    assert cluster.contributors() == {step: {0, 1} if step <= 3 else {1, 2} for step in range(1, 7)}
    assert [[c.batches for c in r.commits] for r in replicas[1:]] == [[2, 4, 6, 8, 10, 12]] * 2
    assert [r.vetoes for r in replicas[1:]] == [[3], [3]]


# ------------------------------------------------------------ late heal


def test_a_member_that_fell_behind_heals_during_the_step(cluster: Cluster) -> None:
    """Asynchronous quorums: zeros in this step, the state applied in should_commit, the same averaged gradient."""
    short: dict[str, Any] = {"timeout": timedelta(seconds=1), "time_overrides": {"join_s": 0.3, "heal_s": 5.0}}
    slow = Replica(1, steps=12, optim=sgd, **short)

    def hang(replica: Replica) -> None:
        assert replica.gate.wait(20)

    def release(actor: Replica) -> None:
        slow.gate.set()
        cluster.lets_in(slow)(actor)

    slow.actions[3, "forward"] = hang
    cluster.run(Replica(0, steps=12, optim=sgd, at={(6, "boundary"): release}, **short), slow)
    cluster.check(steps=12)
    cluster.check_numbers(optim=sgd)
    healed = next(c for c in slow.commits if c.step > 4)
    assert not healed.participated
    assert slow.commits[slow.commits.index(healed) + 1].participated


def test_init_sync_false_keeps_what_each_has(cluster: Cluster) -> None:
    firsts: dict[int, str] = {}

    def look(replica: Replica) -> None:
        firsts[replica.index] = replica.digest()

    replicas = [Replica(i, init_sync=False, steps=1, at={(0, "forward"): look}) for i in range(2)]
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None, None]
    assert firsts[0] != firsts[1]


# ------------------------------------------------------------ mixed precision


def test_grad_scaler(cluster: Cluster) -> None:
    class Scaled(Replica):
        def wrap(self) -> None:
            super().wrap()
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
            self.manager.register_state_dict_fn("scaler", self.scaler.load_state_dict, self.scaler.state_dict)

        def iteration(self) -> None:
            self.step = self.manager.current_step()
            self.optimizer.zero_grad()
            loss = self.scaler.scale(self.loss())
            if self.step == 2 and self.index == 1:
                loss = loss * float("inf")
            self.at("forward")
            loss.backward()
            participated = self.manager.is_participating()
            self.scaler.step(self.optimizer)
            self.scaler.update(None if self.optimizer.committed else self.scaler.get_scale())
            self.record(self.optimizer.committed, participated)
            if self.optimizer.committed:
                scales.setdefault(self.manager.current_step(), set()).add(self.scaler.get_scale())

    scales: dict[int, set[float]] = {}
    cluster.run(
        Scaled(0, optim=sgd, steps=8, use_async_quorum=False, at={(5, "forward"): soft_error}),
        Scaled(1, optim=sgd, steps=8, use_async_quorum=False),
    )
    cluster.check(steps=8)
    assert all(len(s) == 1 for s in scales.values()), scales
    assert scales[3] == {32.0}  # overflow on one replica: all skipped the update, all halved
