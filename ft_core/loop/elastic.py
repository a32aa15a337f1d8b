"""Elastic data under a framework: its DataLoader made elastic by its settings, and a user's own elastic one checked.

How it works. The number of micro-batches per step follows from the global batch where there is one; else it is what the
framework accumulates. Errors name both settings in the words of the framework (`Words`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft_core.data import ElasticDataLoader, elastic_loader
from ft_core.errors import ConfigError
from ft_core.settings import Environment

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Words:
    """What the framework calls things."""

    accumulation: str
    """Its setting for accumulation, as the user writes it."""
    rank: str
    """The rank inside the group, as an expression."""
    ranks: str
    """The number of ranks of the group."""


@dataclass(frozen=True)
class Elasticity:
    """How the data of one rank is made elastic.

    Args:
        words: of the framework.
        rank: of this process in its group.
        ranks: of the group.
        accumulate: micro-batches per step, as the framework was told.
        global_batch_size: samples of a step over all replicas; None: it follows from the loader and who is there.
        max_micro_steps: most micro-batches per step; None: no limit.
        min_replicas: the smallest quorum, which has to be able to make a whole step; None: FT_MIN_REPLICAS, else 1.
        seed: of the order of each epoch.
    """

    words: Words
    rank: int
    ranks: int
    accumulate: int
    global_batch_size: int | None = None
    max_micro_steps: int | None = None
    min_replicas: int | None = None
    seed: int = 0

    def check(self, global_batch_size: int | None) -> None:
        """Whether accumulation and a global batch exclude each other. Raises ConfigError."""
        if global_batch_size is not None and self.accumulate != 1:
            raise ConfigError(
                f"{self.words.accumulation}={self.accumulate} with global_batch_size={global_batch_size}: the number "
                f"of micro-batches per step follows from the global batch; leave {self.words.accumulation} out"
            )

    def make(self, loader: DataLoader[Any]) -> ElasticDataLoader:
        """The same data, each sample of an epoch in exactly one committed step.

        Raises:
            ConfigError: it cannot be divided exactly, or settings exclude each other.
        """
        self.check(self.global_batch_size)
        smallest = self.min_replicas or Environment.read(os.environ).min_replicas or 1
        return elastic_loader(
            loader, seed=self.seed, global_batch_size=self.global_batch_size,
            accumulation_steps=1 if self.global_batch_size is not None else self.accumulate,
            max_micro_steps=self.max_micro_steps, min_readers=smallest * self.ranks, group_rank=self.rank,
            num_replicas=self.ranks,
        )  # fmt: skip

    def check_own(self, loader: ElasticDataLoader) -> None:
        """Whether a loader of the user's own reads what the framework means. Raises ConfigError."""
        sampler, words = loader.sampler, self.words
        batching = sampler.batching
        self.check(batching.global_batch_size)
        if batching.global_batch_size is None and self.accumulate not in (1, batching.accumulation_steps):
            raise ConfigError(
                f"{words.accumulation}={self.accumulate}, but ElasticDataLoader(accumulation_steps="
                f"{batching.accumulation_steps}): the loader decides; leave {words.accumulation} out, or make them "
                "equal"
            )
        if (sampler.group_rank, sampler.num_replicas) != (self.rank, self.ranks):
            raise ConfigError(
                f"ElasticDataLoader(group_rank={sampler.group_rank}, num_replicas={sampler.num_replicas}) on rank "
                f"{self.rank} of a replica group of {self.ranks}: pass group_rank={words.rank}, "
                f"num_replicas={words.ranks}"
            )
