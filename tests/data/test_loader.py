"""`ElasticDataLoader` and its pipeline: real DataLoaders, with and without workers, through vetoes and changes."""

from __future__ import annotations

import logging
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from ft_core.data import ElasticDataLoader, ElasticSampler
from ft_core.errors import ConfigError
from tests.data.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Samples(Dataset[Tensor]):
    """(index, process that read it)."""

    def __init__(self, length: int, broken: int = -1) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index == self.broken:
            raise ValueError(f"sample {index} cannot be read")
        return torch.tensor([index, os.getpid()])


@pytest.fixture(autouse=True)
def closes() -> Iterator[list[ElasticDataLoader]]:
    loaders: list[ElasticDataLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()


def numbers(batch: Tensor) -> list[int]:
    return [int(i) for i in batch[:, 0]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@WORKERS
@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
def test_everything_once_through_vetoes_and_changes(
    closes: list[ElasticDataLoader], workers: int, loader_class: type[DataLoader[Any]]
) -> None:
    """Two readers in one process; the workers are the same ones from beginning to end."""
    rng = random.Random(workers)
    managers = [Membership(2, 0), Membership(2, 1)]
    loaders = [
        ElasticDataLoader(
            Samples(60), 3, manager=m, shuffle=True, num_workers=workers, loader_class=loader_class,
            global_batch_size=8, multiprocessing_context="fork" if workers else None,
        )
        for m in managers
    ]  # fmt: skip
    closes += loaders
    trained: dict[int, list[int]] = {0: [], 1: []}
    processes: set[int] = set()
    for epoch in (0, 1):
        loops: list[Any] = [iter(loader) for loader in loaders]
        while True:
            if rng.random() < 0.3:  # the second one is away for this step, or back
                managers[0].groups = managers[1].groups = 3 - managers[0].groups
                managers[1].place = 1 if managers[1].groups == 2 else None
            taken = []
            ended = 0
            for loop, loader in zip(loops, loaders, strict=True):
                for batch in loop:
                    if loader.sampler.weight:
                        taken += numbers(batch)
                    processes |= {int(pid) for pid in batch[:, 1]}
                    if loader.last_micro_batch:
                        break
                else:
                    ended += 1
            if ended:
                assert ended == 2
                break
            commit = rng.random() < 0.7
            if commit:
                trained[epoch] += taken
            for manager in managers:
                manager.vote(commit)
    assert all(sorted(samples) == list(range(60)) for samples in trained.values())
    assert processes == {os.getpid()} if not workers else len(processes) <= 2 * workers
    assert loaders[0]._pipeline.replans > 0 or not workers


@WORKERS
def test_nothing_is_planned_anew_while_nothing_changes(closes: list[ElasticDataLoader], workers: int) -> None:
    manager = Membership()
    loader = ElasticDataLoader(Samples(40), 4, manager=manager, num_workers=workers)
    closes.append(loader)
    pids: set[int] = set()
    for _ in loader.epochs(3):
        for batch in loader:
            pids |= {int(pid) for pid in batch[:, 1]}
            manager.vote()
    assert loader._pipeline.replans == 0
    assert len(pids) == max(1, workers)
    assert len(loader) == 10
    assert repr(loader).endswith(f"Pipeline(workers={workers}, {4 if workers else 0} batches ahead, replans=0))")


def test_workers_of_an_epoch_if_wanted(closes: list[ElasticDataLoader]) -> None:
    manager = Membership()
    loader = ElasticDataLoader(Samples(8), 4, manager=manager, num_workers=1, persistent_workers=False)
    closes.append(loader)
    pids = []
    for _ in loader.epochs(2):
        for batch in loader:
            pids.append(int(batch[0, 1]))
            manager.vote()
    assert pids[0] == pids[1] != pids[2] == pids[3]


@WORKERS
def test_what_was_prefetched_is_used_after_a_veto(closes: list[ElasticDataLoader], workers: int) -> None:
    manager = Membership()
    dataset = Samples(40)
    loader = ElasticDataLoader(dataset, 4, manager=manager, shuffle=False, num_workers=workers)
    closes.append(loader)
    seen = []
    for batch in loader:
        seen.append(numbers(batch)[0])
        manager.vote(commit=len(seen) not in (2, 3, 4, 7))
        pipeline = loader._pipeline
        assert len(pipeline._aside) <= pipeline.ahead
    assert seen == [0, 4, 4, 4, 4, 8, 12, 12, 16, 20, 24, 28, 32, 36]


@WORKERS
def test_a_sample_that_cannot_be_read(closes: list[ElasticDataLoader], workers: int) -> None:
    manager = Membership()
    loader = ElasticDataLoader(Samples(12, broken=5), 2, manager=manager, shuffle=False, num_workers=workers)
    closes.append(loader)
    loop = iter(loader)
    seen = [numbers(next(loop))]
    manager.vote()
    seen.append(numbers(next(loop)))
    manager.vote()
    with pytest.raises(ValueError, match="sample 5 cannot be read"):
        next(loop)
    assert seen == [[0, 1], [2, 3]]


def test_a_sample_that_only_the_others_still_need(
    closes: list[ElasticDataLoader], caplog: pytest.LogCaptureFixture
) -> None:
    manager = Membership()
    loader = ElasticDataLoader(Samples(12, broken=5), 2, manager=manager, shuffle=False, num_workers=1)
    closes.append(loader)
    loop = iter(loader)
    assert numbers(next(loop)) == [0, 1]
    manager.vote()
    manager.groups, manager.place = 3, 2
    with caplog.at_level(logging.WARNING, "ft_core"):
        assert numbers(next(loop)) == [6, 7]
    assert "another replica's now could not be read" in caplog.text


def test_the_position_is_the_state() -> None:
    manager = Membership()
    loader = ElasticDataLoader(Samples(8), 2, manager=manager)
    next(iter(loader))
    manager.vote()
    assert loader.state_dict()["taken"] == 2
    other = ElasticDataLoader(Samples(8), 2)
    other.load_state_dict(loader.state_dict())
    other.attach(Membership())
    assert numbers(next(iter(other))) == [2, 3]
    assert (other.epoch, other.last_micro_batch, other.step_samples) == (0, True, 2)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Endless()}, "Endless is an IterableDataset.*IndexedStream.*ReplayedStream"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_sampler": [[0]]}, "batch_sampler=.*sampler=ElasticSampler"),
        ({"drop_last": True}, "drop_last=True: no sample of an epoch is dropped"),
        ({"in_order": False}, "in_order=False"),
        ({"sampler": RandomSampler(range(3))}, "sampler=RandomSampler: must be an ElasticSampler"),
        ({"sampler": ElasticSampler(4, 2), "shuffle": True}, "to be given to the sampler that was passed"),
        ({"samples_per_epoch": 4}, "samples_per_epoch=4: the dataset has a length"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticDataLoader(**({"dataset": Samples(4)} | arguments))


def test_a_sampler_given_twice() -> None:
    sampler = ElasticSampler(4, 2)
    ElasticDataLoader(Samples(4), sampler=sampler)
    with pytest.raises(ConfigError, match=r"used by an ElasticDataLoader over Samples .* already"):
        ElasticDataLoader(Samples(4), sampler=sampler)


def test_a_sampler_made_for_another_dataset() -> None:
    with pytest.raises(ConfigError, match="has 100 samples, and the sampler that was passed was made for 12"):
        ElasticDataLoader(Samples(100), sampler=ElasticSampler(12, 3))
    with pytest.raises(ConfigError, match="seed, accumulation_steps: to be given to the sampler"):
        ElasticDataLoader(Samples(12), sampler=ElasticSampler(12, 3), seed=3, accumulation_steps=2)
