"""A framework's DataLoader made elastic, and what is refused in its words."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from ft_core.data import ElasticDataLoader
from ft_core.errors import ConfigError
from ft_core.loop.elastic import Elasticity, Words

WORDS = Words("accumulate", "my_rank", "my_ranks")


def elasticity(**given: Any) -> Elasticity:
    return Elasticity(WORDS, **{"rank": 0, "ranks": 1, "accumulate": 1, **given})


def loader() -> DataLoader[Any]:
    return DataLoader(list(range(64)), 4)  # type: ignore[arg-type]


def test_the_smallest_quorum_has_to_make_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 samples in micro-batches of 4, two per step at most: one replica cannot, two can."""
    wanted = {"global_batch_size": 16, "max_micro_steps": 2}
    with pytest.raises(ConfigError, match="need 4 micro-steps"):
        elasticity(**wanted).make(loader())
    assert elasticity(**wanted, min_replicas=2).make(loader()).sampler.batching.min_readers == 2
    assert elasticity(**wanted, ranks=2).make(loader()).sampler.batching.min_readers == 2
    monkeypatch.setenv("FT_MIN_REPLICAS", "3")
    assert elasticity(**wanted).make(loader()).sampler.batching.min_readers == 3


def test_micro_batches_are_what_the_framework_accumulates_or_follow_from_the_global_batch() -> None:
    assert elasticity(accumulate=3).make(loader()).sampler.batching.accumulation_steps == 3
    assert elasticity(global_batch_size=8).make(loader()).sampler.batching.global_batch_size == 8
    with pytest.raises(ConfigError, match=r"accumulate=3 with global_batch_size=8.*leave accumulate out"):
        elasticity(accumulate=3, global_batch_size=8).make(loader())


@pytest.mark.parametrize(
    ("given", "own", "message"),
    [
        ({"accumulate": 2}, {}, "accumulate=2, but ElasticDataLoader.accumulation_steps=1.: the loader decides"),
        ({"accumulate": 2}, {"global_batch_size": 8}, "accumulate=2 with global_batch_size=8"),
        ({}, {"num_replicas": 2}, "on rank 0 of a replica group of 1: pass group_rank=my_rank, num_replicas=my_ranks"),
    ],
)
def test_a_loader_of_the_users_own_has_to_fit(given: dict[str, int], own: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        elasticity(**given).check_own(ElasticDataLoader(list(range(64)), 4, **own))  # type: ignore[arg-type]
    elasticity().check_own(ElasticDataLoader(list(range(64)), 4))  # type: ignore[arg-type]
