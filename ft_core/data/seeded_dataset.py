"""`SeededDataset`: random augmentation that follows the sample and the epoch, not the process that loads it.

How it works. An elastic loader hands lists of indices that know their epoch (`EpochIndices`) to the dataset, in
whatever process it is read. Before each sample, `random`, torch's CPU generator and numpy's (if it is loaded) are
seeded from (seed, epoch, index); afterwards they go on where they were.

Invariant: a sample depends on (dataset, seed, epoch, index) alone. Threads: those that read the dataset.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from ft_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["EpochIndices", "SeededDataset", "seed_from"]


class EpochIndices(list[int]):
    """Dataset indices of one micro-batch. `epoch`: of which they are."""

    def __init__(self, epoch: int, indices: Iterable[int]) -> None:
        super().__init__(indices)
        self.epoch = epoch


def seed_from(text: str) -> int:
    """64 bits that follow from `text`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose samples may be made with random numbers.

    Args:
        dataset: with a length and `__getitem__`.
        seed: the same on all replicas.

    Raises:
        UsageError: (when read) it was not read through an ElasticDataLoader, so the epoch is unknown.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed

    def __repr__(self) -> str:
        return f"SeededDataset({type(self.dataset).__name__}, seed={self.seed})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise UsageError(
            f"SeededDataset[{index!r}]: a sample depends on the epoch, which only an ElasticDataLoader tells; read "
            "single samples from its .dataset"
        )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a micro-batch."""
        if not isinstance(indices, EpochIndices):
            raise UsageError("a SeededDataset is read through an ElasticDataLoader, which tells it the epoch")
        samples = []
        with _generators_kept():
            for index in indices:
                _seed(seed_from(f"{self.seed} {indices.epoch} {index}"))
                samples.append(self.dataset[index])
        return samples


def _seed(number: int) -> None:
    random.seed(number)
    torch.default_generator.manual_seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def _generators_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None and states[2] is not None:
            numpy.random.set_state(states[2])
