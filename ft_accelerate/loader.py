"""Training data over all groups: who reads what, and a loader that a newcomer enters in the middle.

How it works. Accelerate's own `prepare_data_loader` divides the data, once among all processes of all groups and once
among those of this group; `GroupDataLoader` holds both. Which it reads is decided when it is iterated: the first if a
prepared model is in training mode, or it was read for training before, and gradients are recorded; else the second, so
that evaluation, and `gather_for_metrics` with it, is each group's own affair and sees all the data (on request the
groups share it: `sharing`).

While it trains, it asks for the window (`StepWindow.before_batch`) before each batch is handed out. If the position has
moved then (this replica took over the others' state, or was a batch behind), it opens its data there: in the sampler,
so nothing is read that is skipped; a stream is read through, and the peers do not wait for that as for a hang.

A newcomer goes on *inside* the loop that it is in, with the others' epoch. Its own loop variable is behind until the
next epoch if the script uses `accelerator.epochs(n)`, and stays behind with `range(n)`; then training ends for it when
the others call `end_training`. `set_epoch` of the script is corrected by the difference.

The division is by the configured number of groups, so shards do not move when one fails; what the missing ones would
have read is not read in that epoch. A group with a higher number reads along with a lower one until the next epoch
begins: then all members see it in the quorum, and divide anew.

Invariants: position (epoch, batch) of each loader is equal on all members whenever a window opens.
Threads: the training thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ft_accelerate import _compat
from ft_accelerate.position import EPOCH, LoaderPosition
from ft_core.errors import ConfigError
from ft_core.loop.sampling import ReplayableSampler, open_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ft_accelerate.sharing import Sharing
    from ft_accelerate.uneven import GroupUnevenEnd
    from ft_core.loop.window import StepWindow

log = logging.getLogger("ft_accelerate")
_END = object()
_OWN = ("_bases", "_divided", "_window", "_uneven", "_sharing", "position")
"""Attributes that a pickled loader has no use for."""


@dataclass(frozen=True)
class LoaderParts:
    """The parts of a run that a prepared loader asks."""

    window: StepWindow
    uneven: GroupUnevenEnd
    sharing: Sharing | None
    """None: each group evaluates all of the data."""


class GroupDataLoader(_compat.DataLoaderShard):  # type: ignore[misc]
    """The loader that `prepare` makes of a DataLoader. Public attributes and methods are DataLoaderShard's.

    Args:
        everybody: as Accelerate prepared it for all processes of all groups.
        inside: for the processes of this group.
        parts: of the run that the loader is read in.
        divided: makes torch's loader of one of so many parts.
    """

    plain: type = _compat.DataLoaderShard
    """Accelerate's class, which a pickled one is of."""

    def __init__(self, everybody: Any, inside: Any, parts: LoaderParts, divided: Callable[[int, int], Any]) -> None:
        kept = dict(everybody.__dict__)
        self._bases = [kept.pop("base_dataloader"), inside.base_dataloader]
        """torch's loaders with the division among everybody, and among this group."""
        self.__dict__.update(kept)
        self._window, self._uneven, self._sharing = parts.window, parts.uneven, parts.sharing
        self._divided = divided
        self.position = LoaderPosition()
        self._first = 0
        """Batch at which each epoch begins (skip_first_batches)."""
        self._trained: bool | None = None
        """Whether it was iterated for training last."""
        manager = parts.window.manager
        self._late = manager is not None and bool(manager.quorum_id)
        """Prepared after training began: a newcomer has not got that far when it takes over the others' state."""

    @property
    def base_dataloader(self) -> Any:
        """torch's loader that is read now: DataLoaderShard's methods take all they need from it."""
        # Before it was iterated: what it would be iterated for now; a script asks for the length of its loaders then.
        training = self._window.training if self._trained is None else self._trained
        return self._bases[0 if training else 1]

    def __iter__(self) -> Iterator[Any]:
        # What was trained on once may be opened before the loop says model.train() again.
        known = self.position.trained and torch.is_grad_enabled() and not self._window.aside
        self._trained = self._window.training or known
        if self._trained and not self.position.trained and self._late and self._window.groups > 1:
            log.warning(
                "a data loader that was prepared after training began is trained on: replica groups that come back "
                "from now on cannot take part; prepare all loaders for training before the first step"
            )
        self.position.trained = self.position.trained or self._trained
        return self._train() if self._trained else self._evaluate()

    @property
    def readers(self) -> int:
        """Processes of this group that read, each its own part."""
        return self._window.ranks

    @property
    def reads(self) -> int:
        """Batches that are read for one that is handed out."""
        return 1

    def __len__(self) -> int:
        """Batches per epoch on this process; in a shared evaluation those of this loop here."""
        sharing = self._sharing
        if sharing is not None and sharing.loop is not None and sharing.loader is self:
            return sharing.loop.done + len(sharing.loop.agenda)
        return len(self.base_dataloader) - self._first

    def __reduce__(self) -> Any:
        """A pickled one is Accelerate's, for all processes of all groups."""
        kept = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        return _rebuild, (self.plain, {**kept, "base_dataloader": self._bases[0]})

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        super().set_epoch(epoch + self.position.ahead)

    def starting_at(self, batch: int) -> GroupDataLoader:
        """The same loader, without the first batches of each epoch."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._first = other.skip_batches = batch
        return other

    @property
    def _replayable(self) -> bool:
        return isinstance(_compat.get_sampler(self._bases[0]), _compat.SeedableRandomSampler)

    # ------------------------------------------------------------ what a newcomer must know

    def progress(self) -> dict[str, int | None]:
        """Position, what its order depends on, and whether it was ever read for training."""
        sampler = _compat.get_sampler(self._bases[0])
        seed = sampler.initial_seed if isinstance(sampler, _compat.SeedableRandomSampler) else None
        return {"at": self.position.code, "seed": seed, "trained": int(self.position.trained)}

    def go_on(self, progress: Mapping[str, int | None]) -> None:
        """Take over what `progress` of a peer returned; counts from the next batch that is read."""
        self.position.moved_to(progress["at"] or 0).taken_over = True
        self._take_seed(progress["seed"])

    def _take_seed(self, seed: int | None) -> None:
        sampler = _compat.get_sampler(self._bases[0])
        if seed is not None and isinstance(sampler, _compat.SeedableRandomSampler):
            sampler.initial_seed = seed

    def divide(self, groups: int) -> None:
        """From the next batch that is opened on, divide the data by so many groups."""
        if isinstance(_compat.get_sampler(self._bases[0]), RandomSampler) and not self._replayable:
            log.warning(
                "this group began alone, with an order of its own (use_seedable_sampler=False): groups that join read "
                "other parts than are left; pass DataLoaderConfiguration(use_seedable_sampler=True)"
            )
        number, rank = groups * self.readers, self._window.rank % self.readers
        shard, index = _compat.shard_of(self._bases[0]), self._window.group % groups * self.readers + rank
        if shard is not None:
            shard.num_processes, shard.process_index = number, index
        elif number > 1:  # one process alone has read all
            before = self.progress()
            self._bases[0] = self._divided(number, index).base_dataloader
            self._take_seed(before["seed"])

    # ------------------------------------------------------------ training

    def _train(self) -> Iterator[Any]:
        if self.rng_types is not None:
            _compat.synchronize_rng_states(self.rng_types, self.synchronized_generator)
        position, window, uneven = self.position, self._window, self._uneven
        position.epoch, position.batch, position.taken_over = self.iteration, self._first, False
        self.begin()
        with window.reading():
            yield from self._batches()
            uneven.run_out(position)
            while self._goes_on:  # those who healed this replica when it was out of data are further
                yield from self._batches()
                uneven.run_out(position)
        if not window.stopped:
            self.iteration += 1
        self.end()

    @property
    def _goes_on(self) -> bool:
        """The others are in a later epoch, and this loop goes on there.

        At the beginning of the next epoch the script's next loop does, unless its number came with the others' state.
        """
        further = self.position.code - (self.iteration + 1) * EPOCH
        return bool(further > 0 or (further == 0 and self.position.taken_over))

    def _batches(self) -> Iterator[Any]:
        """Those of one epoch, from `position` on."""
        position, window, uneven = self.position, self._window, self._uneven
        source: _Source | None = None
        uneven.loop_begins()
        while (source is None or not source.empty) and not uneven.over:
            at = position.code
            window.before_batch(position)
            if window.stopped:
                break
            if position.batch == 0:  # not `_first`, which may differ on a newcomer
                window.epoch_begins()
            if position.code != at or source is None:
                if source is not None and position.epoch > self.iteration and not self._goes_on:
                    window.busy("ending the epoch that the others have ended")
                    break
                source = self._open()
                if source.empty:
                    break
            position.batch += 1
            yield source.take(self)

    def _open(self) -> _Source:
        """The data from `position` on."""
        position = self.position
        position.ahead += position.epoch - self.iteration
        position.taken_over = False
        super().set_epoch(position.epoch)
        self.end_of_dataloader = False
        if _compat.can_skip(self.base_dataloader):
            with open_at(self.base_dataloader, position.batch * self.reads):
                return _Source(self._handed_out(iter(self.base_dataloader)), self._uneven)
        iterator = iter(self.base_dataloader)
        if position.batch and (self._window.rank == 0 or self.readers > 1):
            with self._window.pause("reading through the data that the others have read"):
                for _ in range(position.batch * self.reads):
                    if next(iterator, _END) is _END:
                        break
        return _Source(self._handed_out(iterator), self._uneven)

    def _handed_out(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of this process, made of what is read."""
        return iterator

    def _evaluate(self) -> Iterator[Any]:
        sharing = self._sharing
        return super().__iter__() if sharing is None else sharing.batches(self, self._first, super().__iter__)


def _rebuild(kind: type, kept: dict[str, Any]) -> Any:
    loader: Any = object.__new__(kind)
    loader.__dict__.update(kept)
    return loader


class _Source:
    """Batches, one of them read ahead: the last one must be known as such when it is handed out."""

    def __init__(self, iterator: Iterator[Any], uneven: GroupUnevenEnd) -> None:
        self._iterator = iterator
        self._uneven = uneven
        self._read()

    def _read(self) -> None:
        self._next = next(self._iterator, _END)
        self.empty = self._uneven.ends(self._next is _END)
        """There is no further batch."""

    def take(self, loader: GroupDataLoader) -> Any:
        """The next batch, on the device; as DataLoaderShard does it, with its state of before the read-ahead."""
        batch = self._next
        if loader.device is not None:
            batch = send_to_device(batch, loader.device, non_blocking=loader._non_blocking)
        loader._update_state_dict()
        self._read()
        if self.empty:
            loader.end_of_dataloader = True
            loader._update_state_dict()
        return batch


def divider(accelerator: Any, loader: Any, window: StepWindow, device_placement: bool) -> Callable[..., Any]:
    """A function that makes Accelerate's loader of one part of the data, called with number of parts and index.

    Args:
        accelerator: whose settings count.
        loader: the user's, or a prepared one.
        window: of the accelerator's run.
        device_placement: put batches on the accelerator's device.

    Raises:
        ConfigError: a batch that cannot be split among all processes.
    """
    ranks, groups = accelerator.num_processes, window.groups
    everybody = ranks * groups
    if accelerator.split_batches and loader.batch_size is not None and loader.batch_size % everybody:
        raise ConfigError(
            f"split_batches=True with batch_size={loader.batch_size}: it must be a multiple of {everybody}, the "
            f"processes of all groups ({groups} groups of {ranks}), also when some of them are away"
        )
    if groups > 1:
        _make_replayable(loader, accelerator.dataloader_config.data_seed)

    # Not the accelerator, which keeps the loader: who drops both is rid of the workers at once.
    settings, device, rng_types = accelerator.dataloader_config, accelerator.device, accelerator.rng_types
    seedable, stateful = accelerator.use_seedable_sampler, accelerator.use_stateful_dataloader

    def divided(number: int, index: int, *, dispatch: bool = False, slice_fn: Any = None) -> Any:
        return _compat.prepare_data_loader(
            loader,
            device,
            num_processes=number,
            process_index=index,
            split_batches=settings.split_batches,
            put_on_device=device_placement,
            rng_types=rng_types.copy(),
            dispatch_batches=dispatch,
            even_batches=settings.even_batches,
            slice_fn_for_dispatch=slice_fn,
            # One group alone has nobody to share an order with: it keeps the one that the user asked for.
            use_seedable_sampler=seedable or window.groups > 1,
            data_seed=settings.data_seed,
            non_blocking=settings.non_blocking,
            use_stateful_dataloader=stateful,
        )

    return divided


def prepare(accelerator: Any, divided: Callable[..., Any], parts: LoaderParts) -> GroupDataLoader:
    """A loader whose data each process of all groups reads a part of.

    Args:
        accelerator: whose settings count.
        divided: made by `divider`.
        parts: of the accelerator's run.
    """
    ranks, rank, groups = accelerator.num_processes, accelerator.process_index, parts.window.groups
    whole = divided(ranks * groups, parts.window.group % groups * ranks + rank)
    return GroupDataLoader(whole, divided(ranks, rank), parts, divided)


def _make_replayable(loader: Any, seed: int | None) -> None:
    """A sampler that draws from the global generator has another order on every replica: let the epoch decide it.

    RandomSampler becomes Accelerate's SeedableRandomSampler; samplers with `set_epoch` know what they do.
    """
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return
    sampler = batches.sampler
    known = isinstance(sampler, SequentialSampler | RandomSampler) or hasattr(sampler, "set_epoch")
    if isinstance(sampler, Sampler) and not known:
        batches.sampler = ReplayableSampler(sampler, seed or 0)
