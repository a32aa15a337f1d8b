"""`ElasticDataLoader`: batches of an `ElasticSampler`, fetched by torch's DataLoader and its workers.

How it works. Iterating opens step after step (`ElasticSampler.steps`, which calls manager.start_quorum) and fetches the
step's micro-batches through a `Pipeline`, which keeps workers ahead on the assumption that nothing changes. A training
loop reads as always:

    for epoch in loader.epochs(10):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()

A vetoed step's samples come again by themselves. With several micro-batches per step, forward and backward run under
`ddp.no_sync()` unless `loader.last_micro_batch`, and `zero_grad` and `step` are called once per step. Losses are means
over the micro-batch: the loader reports to the Manager how many samples that were.

Workers live as long as the loader (`persistent_workers=False`: as long as an epoch): a restart at each change of plan
would cost more than what they fetched in vain.

Threads: the training thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ft_core.data.prefetch import Pipeline
from ft_core.data.sampler import ElasticSampler
from ft_core.data.stream import IndexedStream
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized

    from torch.utils.data import Dataset

    from ft_core.data.interface import DataManager

__all__ = ["ElasticDataLoader"]

OURS = {
    "batch_sampler": "the elastic sampler is the batch sampler; pass sampler=ElasticSampler(...)",
    "drop_last": "no sample of an epoch is dropped; the last batches are shorter, and weighted accordingly",
    "in_order": "batches are handed out in the order of the plan",
}


class ElasticDataLoader:
    """Loads each sample of an epoch exactly once over all replica groups that are there.

    Not a subclass of torch's DataLoader on purpose: frameworks exchange the sampler of those they are given.

    Args:
        dataset: a map-style dataset with a length, or an `IndexedStream`.
        batch_size: samples per micro-batch at most.
        manager: the `Manager`, before its first start_quorum; None: `attach` it later.
        shuffle: a new order in each epoch.
        sampler: an `ElasticSampler` of one's own, instead of batch_size, shuffle, manager and what goes to it.
        samples_per_epoch: what counts as an epoch of an `IndexedStream` without end.
        seed, global_batch_size, accumulation_steps, max_micro_steps, min_readers, fixed_micro_batches, group_rank,
            num_replicas: of `ElasticSampler`.
        loader_class: the DataLoader that fetches, for example torchdata's StatefulDataLoader (the position is the
            sampler's; a state that the dataset keeps in workers is not part of it).
        options: of that DataLoader: num_workers, collate_fn, pin_memory, prefetch_factor, worker_init_fn,
            multiprocessing_context, timeout, persistent_workers, ...

    Raises:
        ConfigError: an argument cannot work; the message names it.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | IndexedStream[Any],
        batch_size: int = 1,
        *,
        manager: DataManager | None = None,
        shuffle: bool | None = None,
        sampler: ElasticSampler | None = None,
        samples_per_epoch: int | None = None,
        seed: int = 0,
        global_batch_size: int | None = None,
        accumulation_steps: int = 1,
        max_micro_steps: int | None = None,
        min_readers: int = 1,
        fixed_micro_batches: bool = False,
        group_rank: int = 0,
        num_replicas: int = 1,
        loader_class: type[DataLoader[Any]] = DataLoader,
        **options: Any,
    ) -> None:
        _check(dataset, options)
        self.dataset = dataset
        if sampler is None:
            length = _epoch_of(dataset, samples_per_epoch)
            sampler = ElasticSampler(
                cast("Sized", dataset) if length is None else length,
                batch_size, shuffle=bool(shuffle), seed=seed, global_batch_size=global_batch_size,
                accumulation_steps=accumulation_steps, max_micro_steps=max_micro_steps, min_readers=min_readers,
                fixed_micro_batches=fixed_micro_batches, group_rank=group_rank, num_replicas=num_replicas,
            )  # fmt: skip
        else:
            said = {
                "batch_size": batch_size != 1, "shuffle": shuffle is not None, "seed": seed != 0,
                "samples_per_epoch": samples_per_epoch is not None, "global_batch_size": global_batch_size is not None,
                "accumulation_steps": accumulation_steps != 1, "max_micro_steps": max_micro_steps is not None,
                "min_readers": min_readers != 1, "fixed_micro_batches": fixed_micro_batches,
                "group_rank": group_rank != 0, "num_replicas": num_replicas != 1,
            }  # fmt: skip
            _check_sampler(sampler, dataset, [name for name, given in said.items() if given])
        sampler.claim(f"an ElasticDataLoader over {type(dataset).__name__} ({id(self):#x})")
        self.sampler = sampler
        self._endless = isinstance(dataset, IndexedStream) and dataset.length is None
        self._keep_workers = bool(options.pop("persistent_workers", True))

        def make(batches: Iterable[list[int]]) -> DataLoader[Any]:
            return loader_class(dataset, batch_sampler=batches, **options)

        self._make = make
        self._pipeline = Pipeline(make, self._indices)
        if manager is not None:
            self.attach(manager)

    def __repr__(self) -> str:
        return f"ElasticDataLoader({self.sampler!r}, {self._pipeline!r})"

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch that nothing disturbs, at the membership of the last step."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler
        for step in sampler.steps():
            while not step.complete:
                number = step.handed_out
                micro_batch = step.micro_batches[number]
                batch = self._pipeline.get(micro_batch, partial(sampler.forecast, step, number))
                sampler.hand_out(micro_batch)
                yield batch
        if not self._keep_workers:
            self.close()

    def _indices(self, micro_batch: Any) -> list[int]:
        indices = self.sampler.indices(micro_batch)
        if self._endless:  # the stream goes on where the epoch before ended
            first = micro_batch.epoch * self.sampler.cursor.length
            return [first + index for index in indices]
        return indices

    def plain(self, *, shuffle: bool = False) -> DataLoader[Any]:
        """A DataLoader that reads all of the dataset by itself: to evaluate, or without replica groups."""
        data = cast("Sized", self.dataset)
        samples = RandomSampler(data) if shuffle else SequentialSampler(data)
        return self._make(BatchSampler(samples, self.sampler.batching.batch_size, drop_last=False))

    def close(self) -> None:
        """End the workers; the next loop starts new ones."""
        self._pipeline.close()

    # ------------------------------------------------------------ the sampler's, for training loops and front ends

    def attach(self, manager: DataManager) -> None:
        """Follow this Manager's quorums and commits, before its first start_quorum."""
        self.sampler.attach(manager)

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs until `count` have been trained on; `ElasticSampler.epochs` has the details."""
        return self.sampler.epochs(count)

    def set_epoch(self, epoch: int) -> None:
        """The next loop is over this epoch; `ElasticSampler.set_epoch` has the details."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: what committed steps have taken."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after that, from the next loop on."""
        self.sampler.load_state_dict(state)

    @property
    def epoch(self) -> int:
        """Epoch of the next step."""
        return self.sampler.epoch

    @property
    def last_micro_batch(self) -> bool:
        """Reduce gradients and step the optimizer after this batch."""
        return self.sampler.last_micro_batch

    @property
    def ends_epoch(self) -> bool:
        """The batch handed out last is the last one of its epoch, if its step commits."""
        return self.sampler.ends_epoch

    @property
    def batches_left(self) -> int:
        """Micro-batches that this rank is still to be handed in this epoch, if nothing changes."""
        return self.sampler.batches_left

    @property
    def step_samples(self) -> int:
        """Samples of the step over all replicas."""
        return self.sampler.step_samples


def _epoch_of(dataset: object, samples_per_epoch: int | None) -> int | None:
    """Length of an epoch where it is not len(dataset)."""
    stream = dataset if isinstance(dataset, IndexedStream) else None
    if stream is None or stream.length is not None:
        if samples_per_epoch is not None:
            raise ConfigError(f"samples_per_epoch={samples_per_epoch}: the dataset has a length, and that is an epoch")
        return stream.length if stream is not None else None
    if samples_per_epoch is None:
        raise ConfigError("a stream without end needs samples_per_epoch: what counts as one epoch of it")
    return samples_per_epoch


def _check(dataset: object, options: Mapping[str, object]) -> None:
    """Refuse what the loader decides itself, and data that cannot be divided."""
    for name, why in OURS.items():
        if name in options:
            raise ConfigError(f"{name}={options[name]!r}: {why}")
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, IndexedStream):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, of which nobody knows which samples a replica that "
            "died had taken: derive it from ft_core.data.IndexedStream, or wrap it in ft_core.data.ReplayedStream"
        )


def _check_sampler(sampler: object, dataset: object, given: Sequence[str]) -> None:
    """Refuse a sampler that was not made for this dataset, and arguments `given` beside it that belong to it."""
    if not isinstance(sampler, ElasticSampler):
        raise ConfigError(f"sampler={type(sampler).__name__}: must be an ElasticSampler; it divides the samples")
    if given:
        raise ConfigError(f"{', '.join(given)}: to be given to the sampler that was passed, not to the loader")
    length = dataset.length if isinstance(dataset, IndexedStream) else len(cast("Sized", dataset))
    if length is not None and length != sampler.cursor.length:
        raise ConfigError(
            f"the dataset has {length} samples, and the sampler that was passed was made for "
            f"{sampler.cursor.length}: make it from this dataset"
        )
