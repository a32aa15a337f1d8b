"""`ElasticEpochs`: elastic data under transformers.Trainer, as a part of `FaultTolerantTrainerMixin`.

How it works. An optimizer step keeps the samples that Trainer plans for it with all groups there
(`get_total_train_batch_size`), whoever is there: what Trainer computes from that (steps per epoch, `max_steps`, the
schedule) then stays right. Who is left makes more micro-batches per step. Trainer's loop reads all micro-batches of a
step before the first forward; they belong to the step that is open. It wants to know beforehand how many there are per
step (`gradient_accumulation_steps`), so it is entered anew, on the same open iterator, when that number changes.

The epoch is over when the step that has its last samples is committed; `should_epoch_stop` ends Trainer's loop there.

Weights. A micro-batch weighs as many samples as it has, or as many tokens if the loss is a mean over tokens
(`num_items_in_batch`), and its loss is the mean over its own. So the gradient is that of the mean over the whole step.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ft_accelerate.elastic.feed import FILE, load_positions, save_positions
from ft_accelerate.position import EPOCH
from ft_core.errors import FaultToleranceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ft_accelerate.elastic.feed import ElasticFeed
    from ft_accelerate.elastic.loader import ElasticGroupLoader

Base: Any = object
WITHOUT_END = 1 << 40
"""Steps that Trainer's loop may make before it sees that the epoch is over."""
_END = object()


class StepsChange(FaultToleranceError):
    """The step that was read has another number of micro-batches, or is in another epoch."""


@dataclass
class Micro:
    """One micro-batch of the open step."""

    batch: Any
    weight: int
    """Samples or tokens of the whole group's micro-batch."""
    items: Any
    """Tokens that its loss is to be divided by; None: it is a mean over samples."""
    samples: int
    """Samples of the whole group's micro-batch."""
    factor: float
    """The factor of the loss before the group's gradients are averaged."""


@dataclass
class Planned:
    """Stands for a loader of so many batches, for Trainer to plan with."""

    dataset: Any
    batches: int

    def __len__(self) -> int:
        return self.batches


@dataclass
class Reading:
    """The training loop of one epoch."""

    feed: ElasticFeed
    iterator: Iterator[Any]
    epoch: int
    """Epoch of the data."""
    ahead: list[Micro] = field(default_factory=list)
    """The open step, if Trainer has not got it yet."""
    under_way: deque[Micro] = field(default_factory=deque)
    """Micro-batches of the open step whose forward comes next."""
    whole: int = 0
    """Sum of the open step's weights here."""


class ElasticEpochs(Base):  # type: ignore[misc]
    """The part of FaultTolerantTrainerMixin for elastic data."""

    args: Any
    accelerator: Any
    control: Any
    callback_handler: Any
    _ft_target: int | None
    _ft_before: tuple[int, Any]
    _ft_reading: Reading | None = None
    _ft_global: int | None = None
    """`global_batch_size` as the user said it; 0: not."""
    _ft_given_steps = 0
    """`gradient_accumulation_steps` of the user's, while another number is in its place."""

    # ------------------------------------------------------------ how much there is to do

    def get_train_dataloader(self) -> Any:
        """Make the training loader; with elastic data it has the batch of all groups per step."""
        run = self.accelerator._run
        if run is not None and run.plugin.elastic_data:
            plugin, given = run.plugin, self.args.data_seed
            if self._ft_global is None:
                self._ft_global = plugin.global_batch_size or 0
            plugin.global_batch_size = self._ft_global or None
            plugin.global_batch_size = self.get_total_train_batch_size(self.args)
            self.accelerator.gradient_accumulation_steps = 1  # as newer Trainers have it: they divide by themselves
            self.accelerator.dataloader_config.data_seed = self.args.seed if given is None else given
        return super().get_train_dataloader()

    def _ft_planned_data(self, loader: ElasticGroupLoader) -> Planned:
        sampler = loader.elastic.sampler
        updates = -(-sampler.cursor.length // sampler.batching.step_size(1))
        return Planned(loader.dataset, updates * self.args.gradient_accumulation_steps)

    # ------------------------------------------------------------ the loop

    def _ft_elastic_epoch(self, call: Mapping[str, Any]) -> None:
        """Train on the rest of the data's epoch; returns at once from a Trainer's epoch that is over for the others."""
        loader, epoch = call["train_dataloader"], call["epoch"]
        feed = loader.elastic
        if call["resume_from_checkpoint"] is not None and epoch == call["epochs_trained"] and not feed.resumed:
            self._ft_resume_data(feed, call)
        if self._ft_target is not None and self._ft_target // EPOCH != epoch:
            return
        self._ft_target = None
        reading = self._ft_reading
        if reading is None:
            feed.declares = False
            reading = self._ft_reading = Reading(feed, iter(loader), min(epoch, feed.sampler.epoch))
        while True:
            if not reading.ahead:
                self._ft_read(reading)
            there = feed.sampler.epoch
            if there > epoch:
                self._ft_target = there * EPOCH
            if there != reading.epoch:
                reading.epoch = there
                if not reading.ahead:
                    break
                if there > epoch:
                    return  # goes on in Trainer's epoch of that number
            try:
                with self._ft_accumulating(max(1, len(reading.ahead))):
                    super()._run_epoch(**{
                        **call, "train_dataloader": reading.iterator, "resume_from_checkpoint": None,
                        "steps_in_epoch": WITHOUT_END * self.args.gradient_accumulation_steps,
                        "num_update_steps_per_epoch": WITHOUT_END,
                    })  # fmt: skip
            except StepsChange:
                continue
            break
        self._ft_leave(reading)

    def _ft_leave(self, reading: Reading) -> None:
        """Trainer's loop is over: at the end of the epoch, or because somebody wants it."""
        self._ft_reading = None
        sampler = reading.feed.sampler
        if sampler.epoch != reading.epoch or self.accelerator._window.stopped:
            next(reading.iterator, None)  # it ends
        elif not self.control.should_training_stop:
            sampler.skip_to(reading.epoch + 1)

    @contextlib.contextmanager
    def _ft_accumulating(self, steps: int) -> Iterator[None]:
        before = self.args.gradient_accumulation_steps, self._ft_given_steps
        self.args.gradient_accumulation_steps, self._ft_given_steps = steps, self._ft_given_steps or before[0]
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps, self._ft_given_steps = before

    @contextlib.contextmanager
    def _ft_arguments_as_given(self) -> Iterator[None]:
        """Inside, the arguments are as the user gave them, for files."""
        with self._ft_accumulating(self._ft_given_steps or self.args.gradient_accumulation_steps):
            yield

    def _ft_read(self, reading: Reading) -> None:
        """Open the next step and read what this process has of it; nothing at the end of the epoch."""
        reading.ahead = []
        while True:
            batch = next(reading.iterator, _END)
            if batch is _END:
                return
            reading.ahead.append(self._ft_weighed(reading.feed, batch))
            if reading.feed.sampler.last_micro_batch:
                return

    def _ft_weighed(self, feed: ElasticFeed, batch: Any) -> Micro:
        samples, factor, filler = feed.last_weight, feed.sampler.loss_factor, not feed.sampler.weight
        tokens = self._ft_tokens(batch)
        alone = self.args.world_size == 1
        if tokens is None or not (alone or self.args.average_tokens_across_devices):
            return Micro(batch, samples, tokens, samples, factor)
        if filler:
            tokens = torch.zeros_like(tokens)
        if not alone:
            tokens = self.accelerator.reduce(tokens)
        return Micro(batch, int(tokens), tokens.clamp(min=1), samples, 0.0 if filler and not alone else 1.0)

    def _ft_tokens(self, batch: Any) -> Any:
        """Tokens of a batch of this process, as Trainer counts them; None if the loss is no mean over tokens."""
        across, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            items = super()._get_num_items_in_batch([batch], self.args.device)
        finally:
            self.args.average_tokens_across_devices = across
        return None if items is None else torch.as_tensor(items, device=self.args.device)

    def _ft_elastic_samples(self, reading: Reading) -> Any:
        """For `get_batch_samples`: all micro-batches of the open step."""
        if not reading.ahead:
            self._ft_read(reading)
        if self.accelerator._window.stopped:
            self.control.should_training_stop = True
            return [], None
        step = reading.ahead
        if len(step) != self.args.gradient_accumulation_steps or reading.feed.sampler.epoch != reading.epoch:
            raise StepsChange(f"{len(step)} micro-batches in epoch {reading.feed.sampler.epoch}")
        if not any(micro.weight for micro in step) and any(micro.samples for micro in step):
            step[0].weight = 1  # no token at all: with nothing in it, the step would be voted down again and again
        reading.ahead, reading.under_way, reading.whole = [], deque(step), sum(micro.weight for micro in step)
        self._ft_before = self.accelerator.committed_steps, self._tr_loss.clone()
        return [micro.batch for micro in step], step[0].items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run forward and backward; elastic data: the loss is the mean over this micro-batch, weighed by its size."""
        reading = self._ft_reading
        if reading is None or not reading.under_way:
            return super().training_step(model, inputs, num_items_in_batch)
        micro, feed = reading.under_way.popleft(), reading.feed
        self.accelerator.manager.hooks.weigh(micro.weight)
        self.current_gradient_accumulation_steps, feed.factor = 1, micro.factor
        try:
            loss = super().training_step(model, inputs, micro.items)
        finally:
            feed.factor = None
        # What is logged: of the mean over the step.
        return loss * (micro.factor * micro.weight / reading.whole) if reading.whole else torch.zeros_like(loss)

    def _ft_place_of(self, reading: Reading, state: Any) -> None:
        """After a step: where the epoch is."""
        cursor = reading.feed.sampler.cursor
        state.epoch = cursor.epoch + (cursor.length - cursor.left) / cursor.length
        if cursor.epoch != reading.epoch:
            self.control.should_epoch_stop = True

    # ------------------------------------------------------------ checkpoints

    def _ft_resume_data(self, feed: ElasticFeed, call: Mapping[str, Any]) -> None:
        """Where a checkpoint was saved: as it says, or, if it is a plain Trainer's, as its steps say."""
        checkpoint, sampler = call["resume_from_checkpoint"], feed.sampler
        self._load_rng_state(checkpoint)
        if os.path.isfile(os.path.join(checkpoint, FILE)) and not self.args.ignore_data_skip:
            load_positions([feed], checkpoint)
            return
        steps = call["steps_trained_in_current_epoch"] // self.args.gradient_accumulation_steps
        taken = 0 if self.args.ignore_data_skip else steps * sampler.batching.step_size(1)
        place = {"epoch": call["epochs_trained"], "taken": taken, "steps": steps, "returned": []}
        feed.load_state_dict({**sampler.state_dict(), **place})


def save(trainer: Any, folder: str) -> None:
    """Beside the files of Trainer's checkpoint: the position in the data."""
    reading = trainer._ft_reading
    if reading is not None:
        save_positions([reading.feed], folder)
