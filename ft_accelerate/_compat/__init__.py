"""Everything of Accelerate and transformers that is not their public API, in one package.

How it works. Here is what the Accelerator, its loaders and optimizers rely on: base classes, and what is read or called
of them. `launch` has what the command line relies on, `trainer` what the mixin for transformers.Trainer does: it alone
needs transformers. Each function says what it relies on. Checked with the lowest and the newest supported versions
(scripts/check-accelerate-matrix).

Threads: the training thread.
"""

from __future__ import annotations

import os
from typing import Any

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
    """The user's arguments of torch's DDP: the values of a DistributedDataParallelKwargs that are not its defaults."""
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
    """The object that divides a prepared loader's data (has `num_processes` and `process_index`), or None.

    Relies on BatchSamplerShard and IterableDatasetShard, which `prepare_data_loader` puts in.
    """
    for place in (loader.batch_sampler, loader.sampler, loader.dataset):
        if hasattr(place, "num_processes") and hasattr(place, "process_index"):
            return place
    return None


def can_skip(base: Any) -> bool:
    """`open_at` can open this loader at any batch without reading what is before it."""
    return type(base) is DataLoader and not isinstance(base.dataset, IterableDataset)
