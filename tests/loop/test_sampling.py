"""Samplers and loaders that go on anywhere, and by how many groups data is divided."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from ft_core.loop.sampling import ReplayableSampler, can_skip, groups_needed, open_at

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # workers are forked


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, size: int = 24) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(i)]) for i in range(8))


def test_opening_a_loader_at_a_batch() -> None:
    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        data = Numbers()
        loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 1), **options)  # type: ignore[arg-type]
        assert can_skip(loader)
        whole = [batch[:, 0].tolist() for batch in loader]
        sampler = loader.batch_sampler
        data.asked.clear()
        with open_at(loader, 2):
            rest = iter(loader)
        assert loader.batch_sampler is sampler
        assert [batch[:, 0].tolist() for batch in rest] == whole[2:]
        assert data.asked == ([] if options else [int(i) for i in whole[2]])
        assert [batch[:, 0].tolist() for batch in loader] == whole
        with open_at(loader, 9):
            assert list(loader) == []
    unbatched: DataLoader[Any] = DataLoader(Numbers(), None, sampler=range(6))
    with open_at(unbatched, 4):
        assert [int(x) for x in unbatched] == [4, 5]
    assert not can_skip(DataLoader(Stream()))
    assert not can_skip([1, 2])


def test_replayable_draws_alike_and_leaves_no_trace() -> None:
    own = torch.Generator().manual_seed(3)
    samplers: list[Any] = [RandomSampler(Numbers()), RandomSampler(Numbers(), generator=own)]
    samplers.append(BatchSampler(RandomSampler(Numbers()), 4, drop_last=False))
    for sampler in samplers:
        replayable = ReplayableSampler(sampler, seed=9)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), own.get_state()  # type: ignore[index]
        first = list(replayable)
        torch.rand(1)
        assert list(replayable) == first
        replayable.set_epoch(1)
        assert list(replayable) != first
        assert len(replayable) == len(sampler)
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]
        assert torch.equal(own.get_state(), before[3])
    assert repr(ReplayableSampler(samplers[0], 2)) == "ReplayableSampler(RandomSampler, seed=2, epoch=0)"


def test_groups_are_counted_by_their_numbers() -> None:
    assert groups_needed(2, ["replica-0:ab", "replica-4:cd", "mine:ef"]) == 5
    assert groups_needed(2, ["replica-0:ab"]) == 2
