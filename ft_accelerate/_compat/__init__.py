"""Everything of Accelerate and transformers that is not their public API, in one package.

How it works. Here is what the Accelerator, its loaders and optimizers rely on: base classes, and what is read or called
of them. `launch` has what the command line relies on, `trainer` what the mixin for transformers.Trainer does: it alone
needs transformers. Each function says what it relies on. Checked with the lowest and the newest supported versions
(scripts/check-accelerate-matrix).

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
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
from accelerate.state import AcceleratorState, GradientState, PartialState, is_initialized
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    synchronize_rng_states,
)
from torch.amp import GradScaler
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    "FullyShardedDataParallelPlugin",
    "GradientState",
    "IterableDataset",
    "ParallelismConfig",
    "SeedableRandomSampler",
    "can_skip",
    "check_parallelism",
    "ddp_arguments",
    "flag",
    "get_sampler",
    "inner_optimizer",
    "is_initialized",
    "later_checked_parallelism",
    "open_at",
    "order_of",
    "parallelism_in_force",
    "prepare_data_loader",
    "reading",
    "reset_scaler",
    "scale_losses_on_cpus",
    "shard_of",
    "switch_fsdp_on",
    "synchronize_rng_states",
]


def flag(name: str) -> bool:
    """Whether Accelerate's launcher switched something on: variables such as ACCELERATE_USE_FSDP are "true" then."""
    return os.environ.get(name, "false").lower() == "true"


def parallelism_in_force(given: Mapping[str, Any]) -> Any:
    """The ParallelismConfig that an Accelerator with these arguments uses; None: it has none.

    Relies on Accelerator: it makes one of the environment if ACCELERATE_USE_PARALLELISM_CONFIG says so.
    """
    config = given.get("parallelism_config")
    return ParallelismConfig() if config is None and flag("ACCELERATE_USE_PARALLELISM_CONFIG") else config


def ddp_arguments(handler: Any) -> dict[str, Any]:
    """The user's arguments of torch's DDP: the values of a DistributedDataParallelKwargs that are not its defaults."""
    return dict(handler.to_kwargs()) if handler is not None else {}


@contextlib.contextmanager
def later_checked_parallelism() -> Iterator[None]:
    """While an Accelerator is built, its ParallelismConfig is not compared with where it runs: see `check_parallelism`.

    Relies on ParallelismConfig: Accelerator calls its `_validate_accelerator` once.
    """
    check = ParallelismConfig._validate_accelerator
    ParallelismConfig._validate_accelerator = lambda *_: None
    try:
        yield
    finally:
        ParallelismConfig._validate_accelerator = check


def check_parallelism(accelerator: Any) -> None:
    """Accelerate's own check, once FSDP may be on. Raises ValueError."""
    if accelerator.parallelism_config is not None:
        accelerator.parallelism_config._validate_accelerator(accelerator)


def switch_fsdp_on(state: Any, plugin: Any) -> None:
    """Make Accelerate shard where it would not: on CPUs.

    Relies on AcceleratorState: `distributed_type` there, which the states of a process share with PartialState, and
    `fsdp_plugin` are all that it sets for FSDP. Parameters that the plugin offloads are in CPU memory already, and
    cannot be pinned there without an accelerator.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy  # which only those who shard pay for

    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def scale_losses_on_cpus(accelerator: Any) -> None:
    """With fp16, which Accelerate trains on accelerators only: what it does for FSDP2 there.

    Relies on Accelerator: `scaler` is used by backward, clipping and the optimizers that are prepared from then on.
    """
    if accelerator.state.mixed_precision == "fp16" and accelerator.scaler is None:
        handler = accelerator.scaler_handler
        accelerator.scaler = GradScaler(**{**(handler.to_kwargs() if handler is not None else {}), "device": "cpu"})


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
