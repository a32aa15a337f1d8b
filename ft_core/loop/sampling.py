"""Samplers and loaders that go on anywhere: an order that can be drawn again, reading from a batch on.

How it works. A sampler of the user's (weighted, subset, ...) draws from torch's, Python's or numpy's global generator
or from one of its own. `ReplayableSampler` sets all of them for the time it draws, and puts them back afterwards.
`open_at` skips in the sampler, so the dataset is not asked for what is skipped.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EPOCH_STRIDE = 1_000_003
"""Between the seeds of two epochs; a prime, so that seeds and epochs seldom meet."""


class ReplayableSampler(Sampler[Any]):
    """A sampler whose order follows from (seed, epoch) alone, on every replica and after every restart.

    Args:
        sampler: whose order is to be the same everywhere.
        seed: of the job.
    """

    def __init__(self, sampler: Sampler[Any], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.sampler).__name__}, seed={self.seed}, epoch={self.epoch})"

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; called by the training loop before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        own = getattr(self.sampler, "generator", None)
        seed = (self.seed + EPOCH_STRIDE * self.epoch) % (1 << 32)
        numpy = sys.modules.get("numpy.random")
        python_state, numpy_state = random.getstate(), numpy.get_state() if numpy is not None else None
        own_state = own.get_state() if isinstance(own, torch.Generator) else None
        with torch.random.fork_rng(devices=[]):
            try:
                torch.manual_seed(seed)
                random.seed(seed)
                if numpy is not None:
                    numpy.seed(seed)
                if own is not None and own_state is not None:
                    own.manual_seed((own.initial_seed() + EPOCH_STRIDE * self.epoch) % (1 << 63))
                return iter(list(self.sampler))  # in full: a sampler may draw while it is iterated
            finally:
                random.setstate(python_state)
                if numpy is not None:
                    numpy.set_state(numpy_state)
                if own is not None and own_state is not None:
                    own.set_state(own_state)


class _From:
    """A sampler that skips its first `skip` items."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._sampler, self.skip, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


def order_of(loader: DataLoader[Any]) -> Any:
    """The sampler that decides in which order a loader reads: its batch sampler, or without batching its sampler."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def can_skip(loader: object) -> bool:
    """`open_at` can open this loader at any batch without reading: a map-style DataLoader with a length."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return type(loader).__iter__ is DataLoader.__iter__


@contextlib.contextmanager
def open_at(loader: DataLoader[Any], batch: int) -> Iterator[None]:
    """Inside, the next `iter(loader)` begins at `batch`; new or persistent workers get nothing from before it."""
    skipping = _From(order_of(loader), batch)
    with reading(loader, skipping):
        try:
            yield
        finally:
            skipping.skip = 0  # an iterator with workers made two iterators of it, and may make a third


@contextlib.contextmanager
def reading(loader: DataLoader[Any], order: Any) -> Iterator[None]:
    """Inside, `loader` reads what `order` gives instead of its batch sampler (its sampler, without batching).

    Relies on DataLoader taking its indices from the attribute `batch_sampler` (or `sampler`, without batching), a
    persistent one from the attribute of the same purpose of its iterator.
    """
    attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    original = getattr(loader, attribute)
    persistent = getattr(loader, "_iterator", None)
    vars(loader)[attribute] = order  # DataLoader refuses plain assignment
    if persistent is not None:
        persistent._index_sampler = order
    try:
        yield
    finally:
        vars(loader)[attribute] = original
        for iterator in (persistent, getattr(loader, "_iterator", None)):
            if iterator is not None:
                iterator._index_sampler = original


def groups_needed(groups: int, members: Iterable[str]) -> int:
    """By how many the data must be divided so that each member has a part: groups that joined later have high numbers.

    Args:
        groups: by how many it is divided now.
        members: names of the members of a quorum, as `replica-3:1f2e3d4c`; others do not count.
    """
    numbers = (re.fullmatch(r".*-(\d{1,6})(:\w+)?", name) for name in members)
    return max([groups, *(int(found[1]) + 1 for found in numbers if found)])
