"""Everything of Accelerate and transformers that is not their public API, in one package.

How it works. Here is what the Accelerator, its loaders and optimizers rely on: base classes, and what is read or called
of them. `launch` has what the command line relies on, `trainer` what the mixin for transformers.Trainer does: it alone
needs transformers. Each function says what it relies on. Checked with the lowest and the newest supported versions
(scripts/check-accelerate-matrix).

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    get_sampler,
    prepare_data_loader,
)
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import DistributedDataParallelKwargs, synchronize_rng_states
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradientState",
    "IterableDataset",
    "SeedableRandomSampler",
    "can_skip",
    "ddp_arguments",
    "flag",
    "get_sampler",
    "inner_optimizer",
    "is_initialized",
    "open_at",
    "order_of",
    "prepare_data_loader",
    "reading",
    "reset_scaler",
    "shard_of",
    "synchronize_rng_states",
]


def flag(name: str) -> bool:
    """Whether Accelerate's launcher switched something on: variables such as ACCELERATE_USE_FSDP are "true" then."""
    return os.environ.get(name, "false").lower() == "true"


def ddp_arguments(handler: Any) -> dict[str, Any]:
    """What the user told torch's DDP: the values of a DistributedDataParallelKwargs that are not its defaults."""
    return dict(handler.to_kwargs()) if handler is not None else {}


def inner_optimizer(optimizer: Any) -> Any:
    """torch's optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def reset_scaler(scaler: Any) -> None:
    """A step that was unscaled is not made: the scaler forgets it and keeps its scale.

    Relies on GradScaler: `update(new_scale)` clears what it remembers per optimizer; `_scale` is None before first use.
    """
    if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
        scaler.update(scaler._scale.detach().clone())


# ---------------------------------------------------------------------------------------------------------------- data


def shard_of(loader: Any) -> Any:
    """What divides a prepared loader's data (has `num_processes` and `process_index`), or None.

    Relies on BatchSamplerShard and IterableDatasetShard, which `prepare_data_loader` puts in.
    """
    for place in (loader.batch_sampler, loader.sampler, loader.dataset):
        if hasattr(place, "num_processes") and hasattr(place, "process_index"):
            return place
    return None


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


def can_skip(base: Any) -> bool:
    """`open_at` can open this loader at any batch without reading what is before it."""
    return type(base) is DataLoader and not isinstance(base.dataset, IterableDataset)


def order_of(base: Any) -> Any:
    """What decides in which order a loader reads: its batch sampler, or without batching its sampler."""
    return base.batch_sampler if base.batch_sampler is not None else base.sampler


@contextlib.contextmanager
def reading(base: Any, order: Any) -> Iterator[None]:
    """Inside, the next `iter(base)` reads what `order` says; new or persistent workers get nothing else.

    Relies on torch's DataLoader taking its indices from the attribute `batch_sampler` (or `sampler`, without batching),
    a persistent one from the attribute of the same purpose of its iterator.
    """
    attribute = "batch_sampler" if base.batch_sampler is not None else "sampler"
    original = getattr(base, attribute)
    persistent = getattr(base, "_iterator", None)
    vars(base)[attribute] = order  # DataLoader refuses plain assignment
    if persistent is not None:
        persistent._index_sampler = order
    try:
        yield
    finally:
        vars(base)[attribute] = original
        for iterator in (persistent, getattr(base, "_iterator", None)):
            if iterator is not None:
                iterator._index_sampler = original


@contextlib.contextmanager
def open_at(base: Any, batch: int) -> Iterator[None]:
    """Inside, the next `iter(base)` begins at `batch`, as with `reading`."""
    skipping = _From(order_of(base), batch)
    with reading(base, skipping):
        yield
    skipping.skip = 0  # an iterator with workers made two iterators of it, and may make a third
