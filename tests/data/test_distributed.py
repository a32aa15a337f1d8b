"""The sampler: which rank reads what, and which ranks are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from ft_core.data import DistributedSampler
from ft_core.errors import ConfigError


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def test_global_rank_and_world() -> None:
    sampler = DistributedSampler(Numbers(100), replica_rank=3, num_replica_groups=4, group_rank=1, num_replicas=2)
    assert (sampler.global_rank, sampler.global_world_size) == (7, 8)
    assert (sampler.rank, sampler.num_replicas) == (7, 8)
    assert isinstance(sampler, TorchSampler)


def test_the_name_in_the_reference_implementations_examples() -> None:
    assert DistributedSampler(Numbers(100), replica_group_id=3, num_replica_groups=4).global_rank == 3
    with pytest.raises(ConfigError, match=r"replica_rank=1 and replica_group_id=1 .*pass one"):
        DistributedSampler(Numbers(100), 1, 4, replica_group_id=1)
    with pytest.raises(ConfigError, match="replica_rank must be an int, got None"):
        DistributedSampler(Numbers(100), num_replica_groups=4)


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (3, 1), (2, 3)])
def test_all_ranks_together_read_everything_once(groups: int, ranks: int) -> None:
    seen: list[int] = []
    for replica in range(groups):
        for rank in range(ranks):
            sampler = DistributedSampler(Numbers(24), replica, groups, rank, ranks, shuffle=True, seed=5)
            sampler.set_epoch(2)
            seen += list(sampler)
    assert sorted(seen) == list(range(24))


def test_equal_to_torchs_sampler_and_passes_its_options_on() -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True}
    ours = DistributedSampler(Numbers(25), 1, 2, **options)
    theirs: TorchSampler[int] = TorchSampler(Numbers(25), num_replicas=2, rank=1, **options)
    assert list(ours) == list(theirs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica_rank": 2, "num_replica_groups": 2}, r"replica_rank=2: must be from 0 to 1 \(num_replica_groups=2\)"),
        ({"replica_rank": -1, "num_replica_groups": 2}, "replica_rank=-1"),
        ({"replica_rank": 0, "num_replica_groups": 0}, "num_replica_groups=0: must be at least 1"),
        ({"replica_rank": 0, "num_replica_groups": 1, "group_rank": 4, "num_replicas": 4}, "group_rank=4"),
        ({"replica_rank": 0, "num_replica_groups": 1, "num_replicas": 0}, "num_replicas=0"),
        ({"replica_rank": "1", "num_replica_groups": 2}, "replica_rank must be an int, got '1'"),
        ({"replica_rank": True, "num_replica_groups": 2}, "replica_rank must be an int, got True"),
        ({"replica_rank": 0, "num_replica_groups": 2, "rank": 0}, "rank is computed"),
    ],
)
def test_bad_ranks(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedSampler(Numbers(10), **arguments)


def test_repr() -> None:
    sampler = DistributedSampler(Numbers(10), 1, 2)
    assert repr(sampler) == "DistributedSampler(rank=1 of 2, samples=5, epoch=0)"
