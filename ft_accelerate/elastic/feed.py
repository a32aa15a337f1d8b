"""Elastic data under an Accelerator: each sample of an epoch in exactly one committed step, over all replica groups.

How it works. `ElasticFeed` stands between the elastic loader of one prepared DataLoader and the Manager. To the loader
it is the Manager, so that steps open where the run's windows open (`StepWindow.before_batch`); to the Manager it is the
listener, so that it knows how far each committed step got. It is made at `prepare`, and does nothing before the loader
is read for training: only then is the DataLoader converted (`ft_core.data.elastic_loader`) and attached, before the
first quorum. `loader.ElasticGroupLoader` is what scripts iterate.

Weights. In a group of several processes all of them weigh a micro-batch by the samples of the whole group, and multiply
their losses by `loss_factor` (`ElasticSampler.equal_micro_steps`): inside the group gradients are averaged plainly.

Invariants: at most one ElasticFeed per run is attached; `advanced` and `samples` are those of the last commit, equal on
all members. Threads: the training thread.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from ft_core.data import ElasticDataLoader
from ft_core.errors import ConfigError, FaultToleranceError, UsageError
from ft_core.loop.elastic import Elasticity, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ft_core import Manager
    from ft_core.data.interface import DataListener
    from ft_core.data.sampler import ElasticSampler
    from ft_core.loop.tools import StepAttempt
    from ft_core.loop.window import StepWindow

FILE = "ft_data.json"
"""In a folder of `save_state`: the position in the data."""
WORDS = Words("gradient_accumulation_steps", "accelerator.process_index", "accelerator.num_processes")


class Ended(FaultToleranceError):
    """All replicas have agreed to end the training: no step is opened any more."""


class TrainedFeed:
    """The elastic data that a run trains on: one feed at most."""

    def __init__(self) -> None:
        self.feed: ElasticFeed | None = None
        """Set once it is read for training."""


class ElasticFeed:
    """One training loader's samples, divided per step. The `DataManager` of its sampler, the Manager's listener.

    Args:
        window: whose windows the steps are.
        trained: where the run keeps its feed.
        make: makes the elastic loader, at its first use.
    """

    def __init__(self, window: StepWindow, trained: TrainedFeed, make: Callable[[], ElasticDataLoader]) -> None:
        self._window = window
        self._trained = trained
        self._make = make
        self._loader: ElasticDataLoader | None = None
        self._manager: Manager | None = None
        self._state: tuple[Any, ...] = ()
        self._saved: Mapping[str, Any] | None = None
        self.always = False
        """The user made it elastic: there is no doubt what it is for."""
        self.declares = True
        """Weights are samples, known when a batch is handed out; False: somebody else gives them to the Manager."""
        self.last_weight = 0
        """The weight of the last micro-batch of the whole group."""
        self.factor: float | None = None
        """The factor of the next loss, if the sampler is not to decide it."""
        self.resumed = False
        """A checkpoint said where to begin."""
        self.wanted: int | None = None
        """The epoch that `set_epoch` asked for since the last loop."""
        self.looped: int | None = None
        """Epoch of the last training loop."""
        self.reading = 0
        """Training loops that are open."""
        self.samples = 0
        """In the last committed step, over all replicas."""
        self.advanced = 0
        """Batches, as the user wrote the loader, that the last committed step was worth: what schedules advance by."""

    def __repr__(self) -> str:
        return f"ElasticFeed({self._loader if self._loader is not None else 'not read yet'})"

    # ------------------------------------------------------------ for the prepared loader and the Accelerator

    @property
    def loader(self) -> ElasticDataLoader:
        """The elastic loader. Raises ConfigError if there cannot be one; the message says why."""
        if self._loader is None:
            loader = self._make()
            loader.attach(self)
            loader.sampler.equal_micro_steps = self._window.ranks > 1
            loader.sampler.expect(self._window.groups)
            if self._saved is not None:
                loader.load_state_dict(self._saved)
            self._loader = loader
        return self._loader

    @property
    def sampler(self) -> ElasticSampler:
        """The sampler of that loader."""
        return self.loader.sampler

    @property
    def attached(self) -> bool:
        """The Manager of this run divides these samples."""
        return self._manager is not None and self._manager is self._window.manager

    def open(self) -> ElasticDataLoader:
        """Before a training loop: the loader, attached to the run's Manager.

        Raises:
            ConfigError: another loader is, or this one cannot be divided.
            UsageError: a quorum was opened before the first loop, or there is no model.
        """
        window, loader = self._window, self.loader
        if self.attached:
            return loader
        if not window.models:
            raise UsageError("an elastic loader is read, but no model was prepared: prepare(model, ...) comes first")
        if self._trained.feed is not None:
            raise ConfigError(
                "two elastic loaders are read for training: a step has the samples of one. Join the datasets "
                "(torch.utils.data.ConcatDataset, StackDataset), or leave elastic data off"
            )
        manager = window.start_manager()
        try:
            manager.hooks.attach_data(self)
        except UsageError as error:
            raise UsageError(
                "a model was trained before the elastic loader was read: the first quorum must know how the data is "
                "divided. Begin with `for batch in loader`"
            ) from error
        manager.register_state_dict_fn(*self._state)
        self._manager, self._trained.feed = manager, self
        return loader

    @property
    def hooks(self) -> ElasticFeed:
        """Where its sampler announces weights: here."""
        return self

    def release(self) -> None:
        """The run is over: unless a loop is open, the workers end. Another loop would start new ones."""
        if self._loader is not None and not self.reading:
            self._loader.close()

    def open_loop(self) -> ElasticDataLoader:
        """Open a training loop over the epoch that `set_epoch` asked for. Raises as `open`."""
        loader = self.open()
        wanted, self.wanted = self.wanted, None
        if wanted is not None:
            loader.set_epoch(wanted)
        return loader

    def enter(self, epoch: int) -> int:
        """The number of the epoch that the next loop is over.

        If it is known on all replicas from the beginning which loader is trained on, its first step opens here, so that
        a newcomer receives the number. Else steps open in the loop only, or a newcomer would be in its loop already
        when the others' state is taken here, before what the script does ahead of its loop. Raises Ended.
        """
        sampler = self.sampler
        if epoch > sampler.cursor.epoch:
            sampler.skip_to(epoch)
        if self.always:
            self.open()
            sampler.open_step()
        self.looped = sampler.cursor.epoch
        return self.looped

    def after(self) -> int:
        """The number of the epoch that comes now; what is left of the one that a loop left early is dropped."""
        epoch = self.sampler.cursor.epoch
        return epoch + 1 if epoch == self.looped else epoch

    @property
    def loss_factor(self) -> float:
        """The factor of a loss of this rank, before its group's gradients are averaged."""
        return self.sampler.loss_factor if self.factor is None else self.factor

    @property
    def active(self) -> bool:
        """This data is being trained on: a loop is open, or a batch of it was not voted on yet."""
        return bool(self.reading) or self.sampler.half_read

    def check_vote(self, *, again: bool) -> None:
        """An optimizer is about to be stepped.

        Args:
            again: on other gradients than the vote before it in the same step.

        Raises:
            UsageError: the step's samples are not all there, or were voted on.
        """
        if not self.active:
            return
        if not self.sampler.last_micro_batch:
            raise UsageError(
                "optimizer.step() before the last micro-batch of a step: with elastic data that accumulates, write "
                "`with accelerator.accumulate(model):` around forward, backward and step"
            )
        if again:
            raise UsageError(
                "a second optimizer is stepped on new gradients of the same batch: with elastic data, samples are "
                "committed by one vote. Run all backward passes of a batch before the first optimizer.step()"
            )

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> Mapping[str, Any] | None:
        """The position; None if it was never read for training."""
        return self._saved if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, from the next loop on."""
        self._saved, self.resumed = state, True
        if self._loader is not None:
            self._loader.load_state_dict(state)

    # ------------------------------------------------------------ what the sampler sees of the Manager

    def attach_data(self, listener: DataListener) -> None:
        """There is one listener, the loader's own sampler: `committed` and `vetoed` pass on to it."""

    def register_state_dict_fn(self, *state: Any) -> None:
        """Keep the state functions until there is a Manager."""
        self._state = state

    def start_quorum(self) -> None:
        """Open the window, unless it is open."""
        window = self._window
        if window.stopped:
            raise Ended("training has ended")
        if window.ended:
            raise UsageError(f"the elastic loader is read, but {window.ended}")
        self.open()
        window.before_batch(None)
        if window.stopped:
            raise Ended("training has ended")

    def num_participants(self) -> int:
        """How many replicas divide the open step."""
        assert self._manager is not None
        return self._manager.num_participants()

    def participating_rank(self) -> int | None:
        """The number of this replica among those; None: it has no part."""
        assert self._manager is not None
        return self._manager.participating_rank()

    def weigh(self, weight: int) -> None:
        """Give this micro-batch a weight in the averages of the step."""
        self.last_weight = weight
        if self.declares:
            assert self._manager is not None
            self._manager.hooks.weigh(weight)

    # ------------------------------------------------------------ the Manager's listener

    def describe(self) -> str:
        """The data and its division in one line, equal on all replicas."""
        return self.sampler.describe()

    def committed(self, contributed: Collection[int] | None = None) -> None:
        """The open step was committed."""
        sampler, before = self.sampler, self.sampler.cursor
        if sampler.plan is None:  # a step on something else than this data
            self.samples, self.advanced = 0, self._window.groups * self._window.ranks
            return
        sampler.committed(contributed)
        after = sampler.cursor
        left = after.left if after.epoch == before.epoch else 0
        self.samples = before.left - left
        unit = sampler.batching.batch_size * sampler.batching.accumulation_steps
        done, now = before.length - before.left, before.length - left
        self.advanced = -(-now // unit) - -(-done // unit)

    def vetoed(self) -> None:
        """The open step was not committed."""
        self.sampler.vetoed()

    def undivided(self, attempt: StepAttempt | None) -> float:
        """How many times too large the reduced gradients are until the vote, which divides those of several models."""
        planned = self.sampler.step_samples
        if attempt is None or attempt.verdict is not None or not planned:
            return 1.0
        return planned / attempt.participants


def is_elastic(loader: object) -> bool:
    """Whether the user made it elastic."""
    return isinstance(loader, ElasticDataLoader)


def converted(accelerator: Any, loader: Any, window: StepWindow, trained: TrainedFeed) -> ElasticFeed:
    """The feed of a DataLoader of the user's, made elastic with the settings of the plugin.

    Raises:
        ConfigError: settings that exclude each other.
    """
    plugin, elasticity = accelerator.fault_tolerance_plugin, _elasticity(accelerator, window)
    elasticity.check(plugin.global_batch_size)
    check(accelerator)
    return ElasticFeed(window, trained, lambda: elasticity.make(loader))


def made_by_user(accelerator: Any, loader: ElasticDataLoader, window: StepWindow, trained: TrainedFeed) -> ElasticFeed:
    """The feed of the user's own elastic loader.

    Raises:
        ConfigError: it has a Manager already, or its arguments do not fit this group or the Accelerator.
    """
    check(accelerator)
    _elasticity(accelerator, window).check_own(loader)
    feed = ElasticFeed(window, trained, lambda: loader)
    feed.always = True
    assert feed.loader is loader  # attached, or an error now
    return feed


def _elasticity(accelerator: Any, window: StepWindow) -> Elasticity:
    """The settings; not the Accelerator, which keeps what is made here."""
    plugin = accelerator.fault_tolerance_plugin
    return Elasticity(
        WORDS, window.rank, window.ranks, accelerator.gradient_accumulation_steps, plugin.global_batch_size,
        plugin.max_micro_steps, plugin.min_replicas, accelerator.dataloader_config.data_seed or 0,
    )  # fmt: skip


def check(accelerator: Any) -> None:
    """Refuse settings of the Accelerator that contradict elastic data.

    Raises:
        ConfigError: names the setting and what to do.
    """
    why = {
        "dispatch_batches": (accelerator.dispatch_batches, "one process would read for others"),
        "split_batches": (accelerator.split_batches, "say global_batch_size= for a batch that all share"),
        "use_stateful_dataloader": (accelerator.use_stateful_dataloader, "save_state keeps the position by itself"),
        "sync_each_batch": (
            accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"),
            "replicas have different numbers of micro-batches",
        ),
    }
    for name, (given, reason) in why.items():
        if given:
            raise ConfigError(f"{name}=True cannot be used with elastic data: {reason}; leave it out")


# ---------------------------------------------------------------------------------------------------------------- files


def save_positions(feeds: list[ElasticFeed | None], folder: str) -> None:
    """Write the position of the data that is trained on into a folder of `save_state`.

    Args:
        feeds: of the prepared loaders, in order; None for others.
        folder: is there.
    """
    states = {str(number): feed.state_dict() for number, feed in enumerate(feeds) if feed is not None}
    states = {number: state for number, state in states.items() if state is not None}
    if states:
        with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
            json.dump(states, file)


def load_positions(feeds: list[ElasticFeed | None], folder: str) -> None:
    """Go on where a folder says, if it does.

    Raises:
        ConfigError: the data is not the same, or loaders are missing.
    """
    try:
        with open(os.path.join(folder, FILE), encoding="utf-8") as file:
            states = json.load(file)
    except FileNotFoundError:
        return
    for number, state in states.items():
        feed = feeds[int(number)] if int(number) < len(feeds) else None
        if feed is None:
            raise ConfigError(
                f"{os.path.join(folder, FILE)} has the position of elastic loader number {number}: prepare the same "
                "loaders in the same order as in the run that saved it, with elastic_data=True"
            )
        feed.load_state_dict(state)
