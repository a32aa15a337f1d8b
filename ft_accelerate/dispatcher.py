"""`GroupDispatcher`: `dispatch_batches=True` inside a replica group; its first rank reads for all of its processes.

How it works. The data is divided among the groups, not among their processes. The first rank of a group reads the
group's part: as many batches as there are processes, or one with `split_batches`; the group's processes receive them by
broadcast, and each takes its share. All that a newcomer takes over, and where windows open, is `GroupDataLoader`'s; a
position counts what is handed out. Evaluation is Accelerate's own dispatcher.

The end: a group that cannot read (its first rank died) ends as a whole, as always, and the others go on.

Threads: the training thread.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    get_data_structure,
    initialize_tensors,
    send_to_device,
)

from ft_accelerate import _compat
from ft_accelerate.loader import GroupDataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_accelerate.loader import LoaderParts


class GroupDispatcher(GroupDataLoader, _compat.DataLoaderDispatcher):  # type: ignore[misc]
    """The loader that `prepare` makes with `dispatch_batches=True`. Arguments are those of GroupDataLoader."""

    plain = _compat.DataLoaderDispatcher

    @property
    def readers(self) -> int:
        """One process of the group reads."""
        return 1

    @property
    def reads(self) -> int:
        """Batches of the group's loader that make one of each process."""
        return 1 if self.split_batches else self._window.ranks

    @property
    def total_batch_size(self) -> int:
        """Samples of a batch of all processes of all groups, or in evaluation of this group."""
        size = int(self.base_dataloader.batch_sampler.batch_size if self.base_dataloader.batch_sampler else 1)
        shard = _compat.shard_of(self.base_dataloader)
        return size * (self.reads if shard is None or shard.split_batches else self.reads * shard.num_processes)

    def __len__(self) -> int:
        """Batches per epoch on this process."""
        whole = len(self.base_dataloader)
        return (whole // self.reads if self._drop_last else -(-whole // self.reads)) - self._first

    def _evaluate(self) -> Iterator[Any]:
        return _compat.DataLoaderDispatcher.__iter__(self)  # type: ignore[no-any-return]

    def _handed_out(self, iterator: Iterator[Any]) -> Iterator[Any]:
        ranks, rank, first, size = self._window.ranks, self._window.rank, None, -1
        while True:
            read = self._read(iterator) if rank == 0 else None
            sent = [read is not None, None if read is None else get_data_structure(read)]
            broadcast_object_list(sent)
            if not sent[0]:
                break
            mine = read if rank == 0 else initialize_tensors(sent[1])
            batch = broadcast(send_to_device(mine, self.device, non_blocking=self._non_blocking), from_process=0)
            size = find_batch_size(batch) or 0
            if first is None:
                first = self._sliced(batch, slice(0, ranks))
            if size % ranks:  # the end of an epoch: every process gets equally many
                batch = concatenate([batch, first], dim=0)
            share = -(-size // ranks)
            yield self._sliced(batch, slice(rank * share, (rank + 1) * share))
        self.remainder = size  # of the last one, for gather_for_metrics

    def _sliced(self, batch: Any, part: slice) -> Any:
        return self.slice_fn(batch, part, process_index=self._window.rank, num_processes=self._window.ranks)

    def _read(self, iterator: Iterator[Any]) -> Any:
        """On the first rank: what is to be divided among all; None at the end."""
        batches = list(itertools.islice(iterator, self.reads))
        if not batches or (self._drop_last and len(batches) < self.reads):
            return None
        return batches[0] if len(batches) == 1 else concatenate(batches, dim=0)


def prepare(accelerator: Any, divided: Callable[..., Any], parts: LoaderParts, slice_fn: Any) -> GroupDispatcher:
    """A loader whose data the first process of each group reads a part of, for all of its processes.

    Args:
        accelerator: whose settings count.
        divided: made by `loader.divider`.
        parts: of the accelerator's run.
        slice_fn: takes a process's share of a batch; None: as Accelerate does.
    """
    window = parts.window
    inside = divided(accelerator.num_processes, accelerator.process_index, dispatch=True, slice_fn=slice_fn)
    outside = inside
    if window.groups > 1:
        outside = object.__new__(type(inside))
        outside.__dict__.update(inside.__dict__)
        outside.base_dataloader = divided(window.groups, window.group % window.groups).base_dataloader
    loader = GroupDispatcher(outside, inside, parts, divided)
    loader.device, loader.rng_types, loader.synchronized_generator = accelerator.device, None, None
    return loader
