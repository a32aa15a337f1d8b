"""Elastic data under real Managers, reductions and heals, in threads: the model says how often it saw each sample."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any, cast

import pytest

from ft_core.errors import RefusedError, UsageError
from tests.data.counters import EPOCHS, LENGTH, Counter
from tests.data.managed import Counting
from tests.runtime.harness import Cluster, both, crash, hang, soft_error
from tests.runtime.interleavings import once_held, until_broken

BATCHINGS = [
    pytest.param({}, id="a share each"),
    pytest.param({"accumulation_steps": 2}, id="accumulated"),
    pytest.param({"global_batch_size": 10}, id="constant global batch"),
]


def finish(cluster: Cluster) -> list[Counter]:
    """Those that reached the end, all checked."""
    cluster.check()
    ends = [r for r in cluster.replicas if isinstance(r, Counter) and not r.crashed]
    for replica in ends:
        assert replica.model.faults() == [], f"{replica!r}\n" + "\n".join(cluster.lighthouse.log)
    return ends


@pytest.mark.parametrize("options", BATCHINGS)
def test_undisturbed(cluster: Cluster, options: dict[str, Any]) -> None:
    a, b = Counter(0, loader=options), Counter(1, loader=options)
    cluster.run(a, b)
    assert len(finish(cluster)) == 2
    assert a.epochs_seen == b.epochs_seen == list(range(EPOCHS))
    assert sum(a.samples) == EPOCHS * LENGTH


@pytest.mark.parametrize("point", ["started", "forward", "backward", "stepped"])
@pytest.mark.parametrize("options", BATCHINGS)
def test_a_death_at_any_point(cluster: Cluster, options: dict[str, Any], point: str) -> None:
    replicas = [Counter(i, loader=options) for i in range(3)]
    replicas[1].actions[2, point] = crash
    cluster.run(*replicas)
    assert len(finish(cluster)) == 2


@pytest.mark.parametrize("options", BATCHINGS)
def test_a_newcomer_takes_over_the_position(cluster: Cluster, options: dict[str, Any]) -> None:
    late = Counter(2, loader=options, length=120)
    a, b = (Counter(i, loader=options, length=120) for i in range(2))
    a.actions[8, "boundary"] = cluster.joins(late)
    cluster.run(a, b, expected=2)
    assert len(finish(cluster)) == 3
    assert late.commits[0].step > 1
    assert late.epochs_seen[-1] == EPOCHS - 1


def test_the_samples_of_a_vetoed_step_come_again(cluster: Cluster) -> None:
    a, b = Counter(0), Counter(1)
    a.actions[2, "started"] = soft_error
    b.actions[5, "started"] = both(soft_error, lambda r: r.actions.__setitem__((5, "forward"), soft_error))
    cluster.run(a, b)
    assert len(finish(cluster)) == 2
    assert a.vetoes == b.vetoes == [2, 5]


def test_the_samples_of_a_step_that_one_has_missed_are_not_lost(cluster: Cluster) -> None:
    """An error that is reported after the fence costs its reporter only, which was in it."""
    a, b = Counter(0), Counter(1)
    a.actions = {(2, "backward"): once_held([b], 3, soft_error), (6, "boundary"): until_broken}
    b.actions = {(3, "boundary"): until_broken, (5, "backward"): once_held([a], 6, soft_error)}
    cluster.run(a, b)
    assert len(finish(cluster)) == 2
    assert (a.vetoes, b.vetoes) == ([2], [5])


def test_fewer_samples_than_readers(cluster: Cluster) -> None:
    """Empty shares get fillers, which count nothing."""
    cluster.run(*(Counter(i, length=2, loader={"batch_size": 3}) for i in range(3)))
    assert len(finish(cluster)) == 3
    assert cast("Counter", cluster.replicas[0]).samples == [2, 2]


def test_one_that_hung_is_left_out_and_returns(cluster: Cluster) -> None:
    a, b = Counter(0, length=400), Counter(1, length=400)
    b.actions[4, "started"] = hang
    a.actions[12, "boundary"] = lambda _: b.gate.set()
    a._options["time_overrides"] = b._options["time_overrides"] = {"join_s": 0.3}
    a._options["timeout"] = b._options["timeout"] = timedelta(seconds=2)
    cluster.run(a, b)
    assert finish(cluster)


@pytest.mark.parametrize("seed", range(8))
def test_deaths_and_newcomers_at_random(cluster: Cluster, seed: int) -> None:
    rng = random.Random(seed)
    options = rng.choice([{}, {"accumulation_steps": 2}, {"global_batch_size": 7}])
    replicas = [Counter(i, loader=options, length=150) for i in range(3)]
    alive, *victims = rng.sample(replicas, 3)
    for number, victim in enumerate(victims):
        point = rng.choice(("started", "forward", "backward", "stepped"))
        victim.actions[rng.randint(2, 6) + 4 * number, point] = crash
    newcomer = Counter(3, loader=options, length=150)
    alive.actions[rng.randint(2, 8), "boundary"] = cluster.joins(newcomer)
    cluster.run(*replicas)
    assert len(finish(cluster)) == 2


def test_a_newcomer_with_other_data_is_told_so(cluster: Cluster) -> None:
    # Long enough that it comes while they train: a room that has finished would tell it only that.
    late = Counter(2, length=601)
    late._build = lambda: Counting(600, EPOCHS)
    a, b = Counter(0, length=600), Counter(1, length=600)
    a.actions[3, "boundary"] = lambda r: r.cluster.start(late)
    cluster.run(a, b)
    assert isinstance(late.error, RefusedError)
    assert "reads other data" in str(late.error)
    assert "601 samples" in str(late.error)
    for replica in (a, b):
        assert (replica.error, replica.model.faults()) == (None, [])


def test_what_an_elastic_loader_does_itself_is_refused(cluster: Cluster) -> None:
    """Weights of the user's would add to the loader's; a replica without data would lose its share of the samples."""

    class Meddles(Counter):
        def train(self) -> None:
            with pytest.raises(UsageError, match=r"set_batch_weight\(7\) with an elastic loader"):
                self.manager.set_batch_weight(7)
            with pytest.raises(UsageError, match=r"run_out\(\), or torch's Join, with an elastic loader"):
                self.manager.run_out()
            super().train()

    replica = Meddles(0)
    cluster.run(replica)
    assert replica.model.faults() == []
