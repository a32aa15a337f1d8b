"""`elastic_loader`: a torch DataLoader said again in the elastic loader's terms, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ft_core.data import ElasticDataLoader, IndexedStream, elastic_loader
from ft_core.errors import ConfigError
from tests.data.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DATA: Dataset[Any] = TensorDataset(torch.arange(10))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Numbers(IndexedStream[int]):
    length = None

    def read(self, positions: Sequence[int]) -> list[int]:
        return list(positions)


def read(loader: ElasticDataLoader, manager: Membership) -> list[list[int]]:
    """One epoch's batches."""
    out: list[list[int]] = []
    for _ in loader.epochs(1):
        for batch in loader:
            assert loader.batches_left == 3 - len(out) - 1
            out.append(batch.tolist())
            manager.vote()
    return out


def test_batches_order_collation_and_workers_are_the_loaders() -> None:
    def collate(samples: list[tuple[Tensor]]) -> Tensor:
        return 100 + torch.stack([sample for (sample,) in samples])

    manager = Membership()
    source = DataLoader(DATA, batch_size=4, collate_fn=collate, num_workers=1, prefetch_factor=3)
    loader = elastic_loader(source, manager=manager)
    try:
        assert read(loader, manager) == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
        assert (loader._pipeline.loader.num_workers, loader._pipeline.loader.prefetch_factor) == (1, 3)
        assert loader.batches_left == 3  # of the next epoch
    finally:
        loader.close()


def test_a_shuffled_one_follows_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        manager = Membership()
        source = DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=lambda s: torch.stack([x for (x,) in s]))
        orders.append(read(elastic_loader(source, manager=manager, seed=seed), manager))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(i for batch in orders[0] for i in batch) == list(range(10))


def test_a_stream_with_numbers() -> None:
    manager = Membership()
    loader = elastic_loader(DataLoader(Numbers(), batch_size=4), manager=manager, samples_per_epoch=10)
    assert [batch for step in read(loader, manager) for batch in step] == list(range(10))


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(DATA, batch_size=4, drop_last=True), "drop_last=True"),
        (DataLoader(DATA, batch_size=4, sampler=Own()), "sampler=Own"),
        (DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
        (DataLoader(DATA, batch_size=4, sampler=RandomSampler(range(10), replacement=True)), "does not read each"),
        (DataLoader(DATA, batch_size=4, sampler=RandomSampler(range(10), num_samples=5)), "does not read each"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "batch_sampler=list"),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(range(10)), 2, True)), "batch_sampler="),
        (DataLoader(Endless(), batch_size=4), "Endless is an IterableDataset"),
        (DataLoader(Numbers(), batch_size=4), "samples_per_epoch"),
        ([1, 2], "a list cannot be made elastic"),
    ],
)
def test_what_cannot_be_divided_exactly_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        elastic_loader(loader)
