"""Real Managers, reductions and heals in threads: bit for bit the trajectory of one process, whatever happens."""

from __future__ import annotations

import copy
import random
import threading
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from ft_core import fixed_order
from ft_core.errors import RefusedError
from tests.fixed_order import reference
from tests.fixed_order.reference import CLASSES, FEATURES, Job
from tests.fixed_order.replica import Follower
from tests.runtime.harness import LIMIT_S, Cluster, Replica, crash, crash_seen, hang, soft_error

if TYPE_CHECKING:
    from tests.runtime.loopback import Loopback


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, CLASSES))


class Mixed(nn.Module):
    """Several dtypes, a shared parameter, one that few micro-batches use and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.b.weight = self.a.weight
        self.wide = nn.Linear(FEATURES, 7, dtype=torch.float64)
        self.narrow = nn.Linear(7, CLASSES, dtype=torch.bfloat16)
        self.rare, self.never = nn.Linear(FEATURES, FEATURES), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        if x[0, 0] > 1.2:
            y = self.rare(y)
        logits: Tensor = self.narrow(self.wide(y.double()).bfloat16())
        return logits


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)


JOBS = {
    "adamw": Job(mlp, adamw),
    "clipped": Job(mlp, sgd, max_norm=0.05),
    "mixed": Job(Mixed, sgd, global_batch_size=20, batch_size=2),
    "one micro-batch": Job(mlp, sgd, global_batch_size=10, batch_size=16),
}


def follows(cluster: Cluster, job: Job) -> list[Follower]:
    """Those that reached the end: with the reference's state, and no loss that is not the reference's."""
    cluster.check()
    digest, losses = reference.run(job)
    curve = {step: loss.hex() for step, loss in enumerate(losses, 1)}
    ends = [r for r in cluster.replicas if isinstance(r, Follower) and not r.crashed]
    for replica in ends:
        assert {step: loss.hex() for step, loss in replica.losses.items()}.items() <= curve.items()
        assert replica.digest() == digest, f"{replica!r}\n" + "\n".join(cluster.lighthouse.log)
    return ends


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_the_membership_does_not_matter(cluster: Cluster, name: str, replicas: int) -> None:
    cluster.run(*(Follower(i, JOBS[name]) for i in range(replicas)))
    ends = follows(cluster, JOBS[name])
    assert len(ends) == replicas
    steps = sum(-(-JOBS[name].length // JOBS[name].global_batch_size) for _ in range(JOBS[name].epochs))
    assert all(sorted(end.losses) == list(range(1, steps + 1)) for end in ends)


@pytest.mark.parametrize("point", ["started", "forward", "backward", "stepped"])
def test_a_death_at_any_point(cluster: Cluster, point: str) -> None:
    replicas = [Follower(i, JOBS["adamw"]) for i in range(3)]
    replicas[1].actions[2, point] = crash
    cluster.run(*replicas)
    assert len(follows(cluster, JOBS["adamw"])) == 2


def test_a_vetoed_step_is_done_again(cluster: Cluster) -> None:
    a, b = Follower(0, JOBS["clipped"]), Follower(1, JOBS["clipped"])
    a.actions[2, "started"] = soft_error
    b.actions[4, "forward"] = soft_error
    cluster.run(a, b)
    assert len(follows(cluster, JOBS["clipped"])) == 2
    assert a.vetoes == b.vetoes == [2, 4]


def test_one_that_hung_is_left_out_and_returns(cluster: Cluster) -> None:
    """It heals while the others train, and follows their commits meanwhile with zeros."""
    job = replace(JOBS["adamw"], length=200)
    options: dict[str, Any] = {"time_overrides": {"join_s": 0.3}, "timeout": timedelta(seconds=2)}
    a, b = Follower(0, job, **options), Follower(1, job, **options)
    b.actions[4, "started"] = hang
    a.actions[12, "boundary"] = lambda _: b.gate.set()
    cluster.run(a, b)
    assert follows(cluster, job)


@pytest.mark.parametrize("seed", range(6))
def test_deaths_and_newcomers_at_random(cluster: Cluster, seed: int) -> None:
    rng = random.Random(seed)
    job = Job(mlp, adamw, length=120, batch_size=rng.randint(1, 4), global_batch_size=rng.randint(5, 20))
    replicas = [Follower(i, job) for i in range(3)]
    alive, *victims = rng.sample(replicas, 3)
    for number, victim in enumerate(victims):
        point = rng.choice(("started", "forward", "backward", "stepped"))
        victim.actions[rng.randint(2, 4) + 3 * number, point] = crash
    newcomer = Follower(3, job)
    alive.actions[rng.randint(2, 6), "boundary"] = cluster.joins(newcomer)
    cluster.run(*replicas)
    assert len(follows(cluster, job)) == 2


def test_a_checkpoint_in_the_middle_of_an_epoch(cluster: Cluster) -> None:
    """Written by one replica, gone on from by two."""
    job = replace(JOBS["adamw"], length=60)
    saved: dict[str, Any] = {}
    both_here = threading.Barrier(2)  # else the first might have finished before the second has opened its lease

    def save_and_crash(replica: Replica) -> None:
        assert isinstance(replica, Follower)
        saved.update(
            copy.deepcopy(
                {
                    "user": replica.state_dict(),
                    "manager": replica.manager.state_dict(),
                    "data": replica.loader.state_dict(),
                }
            )
        )
        crash_seen(replica)

    def load(replica: Replica) -> None:
        assert isinstance(replica, Follower)
        replica.wrap()
        replica.load_state_dict(copy.deepcopy(saved["user"]))
        replica.manager.load_state_dict(saved["manager"])
        replica.loader.load_state_dict(saved["data"])
        both_here.wait(LIMIT_S)

    cluster.run(Follower(0, job, at={(7, "boundary"): save_and_crash}))
    assert saved["data"]["epoch"] == 1
    later = [Follower(i, job, setup=load) for i in (1, 2)]
    cluster.run(*later)
    assert len(follows(cluster, job)) == 2
    assert max(later[0].losses) == 10


class Scaled(Follower):
    """With a GradScaler, whose first scales overflow."""

    def wrap(self) -> None:
        super().wrap()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        self.manager.register_state_dict_fn("scaler", self.scaler.load_state_dict, self.scaler.state_dict)

    def train(self) -> None:
        for _epoch in self.loader.epochs(self.job.epochs):
            self.one_epoch()
        self.manager.leave("the room stays open")

    def one_epoch(self) -> None:
        for batch in self.loader:
            loss = self.job.loss(self.ddp, batch)
            self.wrapper.record_loss(loss)
            self.scaler.scale(loss).backward()
            if self.loader.last_micro_batch:
                self.step = self.manager.current_step()
                self.at("backward")
                self.scaler.unscale_(self.optimizer)
                self.job.clip(self.model)
                self.scaler.step(self.optimizer)
                self.scaler.update(None if self.optimizer.committed else self.scaler.get_scale())
                assert self.wrapper.step_loss is not None
                self.losses[self.manager.current_step()] = self.wrapper.step_loss


def test_a_grad_scaler_scales_alike(cluster: Cluster, lighthouse: Loopback) -> None:
    """Its scale is state: quorums are synchronous, and a veto keeps it."""
    job = replace(JOBS["clipped"], length=150)
    alone = Scaled(0, job, use_async_quorum=False, room_id="alone")  # else one of the others could join its place
    cluster.run(alone)
    others = Cluster(lighthouse)
    a, b = (Scaled(i, job, use_async_quorum=False) for i in (1, 2))
    b.actions[5, "backward"] = crash
    others.run(a, b)
    others.check()
    cluster.check()
    assert a.losses.items() <= alone.losses.items()  # whoever came second has healed over the first steps
    assert max(a.losses) == max(alone.losses)
    assert a.digest() == alone.digest()
    assert a.scaler.get_scale() == alone.scaler.get_scale() < 2.0**127


def test_a_replica_that_computes_otherwise_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(JOBS["adamw"], length=200)
    a, late = Follower(0, job), Follower(1, job)

    def wrap_elsewhere(replica: Replica) -> None:
        monkeypatch.setattr(fixed_order, "_arithmetic", lambda device: "another CPU")
        replica.wrap()

    late._setup = wrap_elsewhere
    a.actions[3, "boundary"] = lambda r: r.cluster.start(late)
    cluster.run(a)
    assert isinstance(late.error, RefusedError)
    assert "another CPU" in str(late.error)
    assert a.error is None
