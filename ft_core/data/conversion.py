"""Makes an `ElasticDataLoader` of a torch DataLoader: for frameworks that are handed the user's own loaders.

How it works. What a DataLoader does to indices (batch size, order) is said again in the elastic loader's terms; what it
does to samples (collation, workers, pinned memory) is handed on to the DataLoader that fetches, of the same class. What
cannot be said that way is refused: an order that only the user's sampler knows, batches of its own making, batches that
are dropped.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ft_core.data.loader import ElasticDataLoader
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from ft_core.data.interface import DataManager

__all__ = ["elastic_loader"]

HANDED_ON = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "persistent_workers",
)  # fmt: skip
"""Attributes of a DataLoader that are arguments of the same name."""


def elastic_loader(
    loader: DataLoader[Any],
    *,
    manager: DataManager | None = None,
    seed: int = 0,
    samples_per_epoch: int | None = None,
    global_batch_size: int | None = None,
    accumulation_steps: int = 1,
    max_micro_steps: int | None = None,
    min_readers: int = 1,
    fixed_micro_batches: bool = False,
    group_rank: int = 0,
    num_replicas: int = 1,
) -> ElasticDataLoader:
    """The same data in the same batches, each sample exactly once over all replica groups that are there.

    Args:
        loader: a DataLoader over a map-style dataset (or an `IndexedStream`) with `shuffle=True` or False; its
            batch_size is what one micro-batch holds at most.
        seed: of the order of each epoch, if it shuffles; the same on all replicas.
        manager, samples_per_epoch, global_batch_size, accumulation_steps, max_micro_steps, min_readers,
            fixed_micro_batches, group_rank, num_replicas: of `ElasticDataLoader`.

    Raises:
        ConfigError: the loader reads in a way that cannot be divided exactly; the message names it and what to do.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"a {type(loader).__name__} cannot be made elastic: pass a DataLoader, or ElasticDataLoader")
    shuffle = _shuffles(loader)
    options: dict[str, Any] = {name: getattr(loader, name) for name in HANDED_ON}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    assert loader.batch_size is not None
    return ElasticDataLoader(
        loader.dataset, loader.batch_size,
        manager=manager, shuffle=shuffle, samples_per_epoch=samples_per_epoch, seed=seed,
        global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, max_micro_steps=max_micro_steps,
        min_readers=min_readers, fixed_micro_batches=fixed_micro_batches, group_rank=group_rank,
        num_replicas=num_replicas, loader_class=type(loader), **options,
    )  # fmt: skip


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether it draws a new order in each epoch. Raises ConfigError for another order than that or the dataset's."""
    if loader.drop_last:
        raise ConfigError(
            "elastic data: drop_last=True, but no sample of an epoch is dropped: leave it out; the last batches are "
            "shorter, and weighted accordingly"
        )
    if loader.batch_sampler is None and loader.batch_size is None:
        raise ConfigError(
            "elastic data: batch_size=None hands out single samples; pass batch_size=, which sample is whose is "
            "decided for whole batches"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"elastic data: {type(loader.dataset).__name__} is an IterableDataset, of which nobody knows which samples "
            "a replica that died had taken: derive it from ft_core.data.IndexedStream, or wrap it in "
            "ft_core.data.ReplayedStream"
        )
    batches: object = loader.batch_sampler
    if type(batches) is not BatchSampler or loader.batch_size is None:
        raise ConfigError(
            f"elastic data: batch_sampler={type(batches).__name__} makes batches of its own, which cannot be divided "
            "anew when a replica fails; pass batch_size= and shuffle= instead"
        )
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            raise ConfigError(
                "elastic data: RandomSampler(replacement=True) or with num_samples does not read each sample once; "
                "pass shuffle=True, or leave elastic data off"
            )
        return True
    raise ConfigError(
        f"elastic data: sampler={type(sampler).__name__} has an order that only it knows; pass shuffle=True or False. "
        "To train on a part of a dataset use torch.utils.data.Subset"
    )
