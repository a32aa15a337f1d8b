"""`ElasticGroupLoader`: a prepared DataLoader whose training data is elastic (`feed`), and the epochs of such data.

How it works. Read for evaluation it is a `GroupDataLoader`. Read for training it hands out the batches of the elastic
loader, on the device, and none is read ahead: whether a batch is the last one of the epoch follows from the open step
(`end_of_dataloader`). After a veto the loop goes on, so there may be several such batches.

A newcomer gets the others' position with the Manager's state when its first step opens, so nothing here is moved, and
the loop that it is in goes on with the rest of their epoch.

Threads: the training thread.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from accelerate.utils import send_to_device

from ft_accelerate import _compat
from ft_accelerate.elastic.feed import Ended, converted, is_elastic, made_by_user
from ft_accelerate.loader import GroupDataLoader, LoaderParts, divider
from ft_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_accelerate.elastic.feed import ElasticFeed, TrainedFeed

log = logging.getLogger("ft_accelerate")


class ElasticGroupLoader(GroupDataLoader):
    """The loader that `prepare` makes of a DataLoader with `elastic_data=True`, or of an `ElasticDataLoader`."""

    elastic: ElasticFeed
    _is_accelerate_prepared: bool

    def __len__(self) -> int:
        """Batches per epoch on this process; in training as many as there are if nothing changes."""
        if not self._for_training:
            return super().__len__()
        try:
            return len(self.elastic.sampler)
        except ConfigError:
            if self._trained:
                raise
            return super().__len__()  # one for evaluation may be what cannot be divided

    @property
    def _for_training(self) -> bool:
        return self._window.training if self._trained is None else self._trained

    @property
    def epoch(self) -> int:
        """Epoch of the next step, counted from the beginning of the run."""
        return self.elastic.sampler.epoch

    @property
    def last_micro_batch(self) -> bool:
        """The optimizer steps after this batch."""
        return self.elastic.sampler.last_micro_batch

    @property
    def batches_left(self) -> int:
        """Batches of the epoch that this process is still to be handed, if nothing changes: for progress bars."""
        return self.elastic.sampler.batches_left

    @property
    def weight(self) -> int:
        """Samples of the batch that count: all, or 0 if this process has none in this step and runs along."""
        return self.elastic.sampler.weight

    @property
    def step_samples(self) -> int:
        """Samples of the open step over all replicas."""
        return self.elastic.sampler.step_samples

    def set_epoch(self, epoch: int) -> None:
        """The next training loop is over this epoch; nothing is read if it is behind us (a newcomer's first loops)."""
        super().set_epoch(epoch)
        self.elastic.wanted = epoch

    def __reduce__(self) -> Any:
        rebuild, (plain, kept) = super().__reduce__()
        return rebuild, (plain, {name: value for name, value in kept.items() if name != "elastic"})

    def _train(self) -> Iterator[Any]:
        feed = self.elastic
        if self._first and not feed.resumed:
            raise UsageError(
                f"skip_first_batches({self._first}) of elastic data: no sample of an epoch is skipped. load_state, "
                "called before, goes on where the checkpoint was saved; it needs no skipping"
            )
        if self.rng_types is not None:
            _compat.synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        self.remainder = 0
        feed.reading += 1
        try:
            with self._window.reading():
                yield from self._batches()
            self.iteration += not self._window.stopped
        finally:
            feed.reading -= 1
            self.end()

    def _batches(self) -> Iterator[Any]:
        feed = self.elastic
        try:
            batches = iter(feed.open_loop())
            while True:
                self.end_of_dataloader = False
                batch = next(batches, _END)
                if batch is _END:
                    return
                feed.looped = feed.sampler.cursor.epoch
                if self.device is not None:
                    batch = send_to_device(batch, self.device, non_blocking=self._non_blocking)
                self.end_of_dataloader = feed.sampler.ends_epoch
                yield batch
        except Ended:
            return


_END = object()


def prepare(
    accelerator: Any, loader: Any, parts: LoaderParts, trained: TrainedFeed, device_placement: bool
) -> ElasticGroupLoader:
    """A loader that is elastic when it is read for training.

    Args:
        accelerator: whose settings count.
        loader: the user's DataLoader, or ElasticDataLoader.
        parts: of the accelerator's run.
        trained: where that keeps its feed.
        device_placement: put batches on the accelerator's device.

    Raises:
        ConfigError: settings that exclude each other; what the DataLoader does is looked at when it is read.
    """
    own, window = is_elastic(loader), parts.window
    feed = (
        made_by_user(accelerator, loader, window, trained)
        if own
        else converted(accelerator, copy.copy(loader), window, trained)
    )
    divided = divider(accelerator, loader.plain() if own else loader, window, device_placement)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    whole = divided(ranks * window.groups, window.group % window.groups * ranks + rank)
    prepared = ElasticGroupLoader(whole, divided(ranks, rank), parts, divided)
    prepared.elastic, prepared._is_accelerate_prepared = feed, True
    return prepared


def feeds(accelerator: Any) -> list[ElasticFeed | None]:
    """The feeds of the prepared loaders, in order; None for those that are not elastic."""
    loaders = [loader for loader in accelerator._dataloaders if isinstance(loader, GroupDataLoader)]
    return [loader.elastic if isinstance(loader, ElasticGroupLoader) else None for loader in loaders]


def of_training(accelerator: Any) -> ElasticFeed | None:
    """The elastic data that is trained on, as far as that is known: it was read, made by the user, or resumed."""
    run = accelerator._run
    if run is None or run.elastic.feed is not None:
        return None if run is None else run.elastic.feed
    known = [
        loader.elastic for loader in accelerator._dataloaders
        if isinstance(loader, ElasticGroupLoader) and (loader.elastic.always or loader.elastic.resumed)
    ]  # fmt: skip
    return known[0] if len(known) == 1 and run.window.models else None


def epochs(accelerator: Any, number: int) -> Iterator[int]:
    """The numbers that `Accelerator.epochs` gives, from `accelerator.epoch` on.

    A newcomer receives the others' number with its first step: here if the loader is the user's own, else in the loop.
    """
    run = accelerator._run
    while accelerator.epoch < number and not (run is not None and run.window.stopped):
        for loader in accelerator._dataloaders if run is not None else ():
            if isinstance(loader, GroupDataLoader):
                loader.position.ahead = 0
        feed = of_training(accelerator)
        if feed is not None:
            try:
                accelerator.epoch = feed.enter(accelerator.epoch)
            except Ended:
                return
            if accelerator.epoch >= number:
                return
        yield accelerator.epoch
        feed = of_training(accelerator)
        accelerator.epoch = accelerator.epoch + 1 if feed is None else feed.after()
