"""A newcomer, or a replica that fell behind, takes over the others' run in the middle of an epoch.

How it works. Before each training batch is fetched, all progress of a Trainer stands between two batches: the quorum
is opened there (`Takeover.before_batch`). A donor's state at that point is a Lightning checkpoint plus what a
checkpoint lacks (`Takeover.state`): the loaders' positions, accumulated metrics, the accumulation window, the epoch in
which loaders were set up. `Takeover.load` puts it into the newcomer's Trainer inside `start_quorum`; then the data is
opened at the batch that is next. As nothing was fetched before, every hook and callback gets the right batch with the
right index, and the replica takes part in this very step.

Accumulation: a quorum is opened at the first batch of a window only, so everybody adopts at the start of a window.

What a newcomer's callbacks see: their own `setup`, `on_fit_start`, sanity check, `on_train_start` and first
`on_train_epoch_start` as in every run, then their state is replaced, and `on_train_epoch_start` is called once more if
the others are in another epoch. The hooks of the batches before are not repeated. State that neither `state_dict` nor
`on_save_checkpoint` knows is not carried over.

Metrics: means over an epoch go on from the donor's sums; `torchmetrics.Metric` objects start with what this replica
sees itself.

Resuming: `fit(ckpt_path=...)` inside an epoch begins at the batch after the checkpoint, on every replica; plain
Lightning begins the epoch's data anew.

A veto in which one survivor stood inside a batch, and another between two, leaves them one batch apart. So the members
of every new quorum go on at the furthest position (`StepWindow.go_on_at`); who is behind goes through its batches
without taking part in steps, hooks and all, until it is there (`OptimizerSteps.open_quorum`): the others' steps of
those batches were vetoed.

Invariants: `load` runs only inside `before_batch`. Position (epoch, batch) is equal on all members whenever a step is
made. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError
from ft_core.loop.position import Position
from ft_core.loop.sampling import groups_needed
from ft_lightning import _compat
from ft_lightning._compat import callbacks as _callbacks
from ft_lightning._compat import position as _position
from ft_lightning.trainer.sharding import Unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ft_core import Manager
    from ft_lightning.trainer.elastic import ElasticData
    from ft_lightning.trainer.sharding import Sharding

log = logging.getLogger("ft_lightning")
KEY = "ft_lightning"
"""The key of our part in the state that donors hand out."""
FETCH_MAX_S = 3600.0
"""Announced to the peers for opening the data; reading through a long iterable takes its time."""


class Takeover:
    """Position of one Trainer in the run that all replicas share.

    Args:
        trainer: in `fit`.
        sharding: of its strategy.
        elastic: of its strategy.
    """

    _uneven = False

    def __init__(self, trainer: Any, sharding: Sharding, elastic: ElasticData) -> None:
        self._trainer = trainer
        self._sharding = sharding
        self._elastic = elastic
        self._open_quorum: Callable[[], Manager] | None = None
        self._run_out: Callable[[], None] | None = None
        self._first = False
        """Of all ranks it is the one that speaks for all, in the quorum of this batch."""
        self._opening = False
        """A quorum is being opened: state may arrive."""
        self._ended = False
        """The last batch is done."""
        self._received: Mapping[str, Any] | None = None
        """Our part of a state that was just loaded."""
        self._before: tuple[int, int] = (0, 0)
        self._met = 0
        """Quorum in which the position was compared with the others' last."""
        self._place = Position()
        """What `position` returned last."""
        self._agreed: tuple[int, int] = (0, 0)
        """The largest position of all members of that quorum, when it was formed."""
        self._ahead: tuple[list[Any], list[Any]] = [], []
        """For loaders that are read one batch ahead: their states now, and one batch ago."""
        self.unseen = Unseen()
        self.adoptions = 0
        """How often this replica took over the others' state in the middle of the run."""

    def __repr__(self) -> str:
        epoch, batch = _position.epoch_and_batch(self._trainer)
        return f"Takeover(epoch {epoch}, batch {batch}, adopted {self.adoptions} times)"

    def start(self, open_quorum: Callable[[], Manager], run_out: Callable[[], None], *, uneven: bool = False) -> None:
        """From now on call `open_quorum` before each batch.

        Args:
            open_quorum: `start_quorum` unless an accumulation window is under way; returns the Manager.
            run_out: called after each batch.
            uneven: the replicas' loaders are of different length on purpose.
        """
        self._uneven = uneven
        self._open_quorum, self._run_out = open_quorum, run_out
        _position.around_each_batch(self._trainer, self.before_batch, self._after_batch)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """After the last batch: who missed the last step takes it from the others, and goes nowhere in the data."""
        self._report_unseen()  # of an epoch that was cut short
        self._opening = self._ended = True
        try:
            yield
        finally:
            self._opening, self._received = False, None

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """After the last batch of an epoch that others are still in: a heal brings their progress, if it is needed."""
        before = _position.epoch_and_batch(self._trainer)[0]
        self._opening = True
        try:
            yield
        finally:
            self._opening = False
            received, self._received = self._received, None
        if received is not None and _position.epoch_and_batch(self._trainer)[0] != before:
            self._move(received)

    @property
    def behind(self) -> bool:
        """The batch that is next is one that other members of this quorum have behind them."""
        return _position.epoch_and_batch(self._trainer) < self._agreed

    @property
    def position(self) -> Position | None:
        """Where this replica is; None: that is not to be compared, as loaders differ, or its training has ended."""
        if self._uneven or self._ended:
            return None
        self._place = Position(*_position.epoch_and_batch(self._trainer))
        return self._place

    def opened(self, manager: Manager) -> None:
        """The window is open: in a new quorum `position` was moved to the furthest of its members."""
        quorum_id, _ = manager.hooks.meeting
        if quorum_id != self._met:
            self._met = quorum_id
            self._agreed = self._place.epoch, self._place.batch

    def stop(self) -> None:
        """The run is over: no quorum is opened before a batch any more."""
        _position.no_longer_around_batches(self._trainer)
        self._open_quorum = self._run_out = None

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The whole progress of the Trainer; the Manager's save function.

        Raises:
            ConfigError: the position in the data is not known.
        """
        trainer = self._trainer
        if _position.position_unknown(trainer):
            raise ConfigError(
                "training_step(dataloader_iter) must take exactly one batch per step with strategy='fault_tolerant': "
                "what it has read ahead cannot be handed to a replica that joins"
            )
        with _callbacks.masks_kept(trainer):
            state = _compat.dump(trainer)
        if self._elastic.active:
            _position.forget_loaders(state)
        ahead = _position.reads_ahead(trainer)
        state[KEY] = {
            "accumulate": trainer.accumulate_grad_batches,
            "hidden": _callbacks.hidden(trainer),
            "loaders": [] if self._elastic.active else self._loaders(ahead),
            "reload": _position.reload_epochs(trainer),
            "metrics": _position.metrics(trainer),
            "groups": self._sharding.groups,
            "unseen": [self.unseen.shares, self.unseen.read],
        }
        return state

    def _loaders(self, ahead: bool) -> list[Any]:
        return list(self._ahead[1]) if ahead else _position.loader_states(self._trainer)

    def load(self, state: Mapping[str, Any]) -> None:
        """The Manager's load function, called inside `start_quorum`: a peer's state at this very point."""
        assert self._opening, "state arrived although no quorum is being opened"
        trainer = self._trainer
        ours = state[KEY]
        _position.restore(trainer, {key: value for key, value in state.items() if key != KEY}, ours["hidden"])
        trainer.accumulate_grad_batches = ours["accumulate"]
        _position.load_metrics(trainer, ours["metrics"])
        self.unseen.shares, self.unseen.read = ours["unseen"]
        self._received = ours

    # ------------------------------------------------------------ a batch

    def before_batch(self) -> None:
        """Open the quorum, and the data at the right place if this replica has moved."""
        assert self._open_quorum is not None
        trainer = self._trainer
        if _position.resumed_mid_epoch(trainer):
            _position.place_data(trainer, [])
        self._before = _position.epoch_and_batch(trainer)
        if self._before[1] == 0:
            self._remember_loaders()  # the epoch's iterator is new and has read its first batch
        self._opening = True
        try:
            manager = self._open_quorum()
        finally:
            self._opening = False
        received, self._received = self._received, None
        if received is not None:
            with manager.pause("opening the training data", FETCH_MAX_S):
                self._move(received)
        self._divide_anew(manager)
        self._count(manager)
        self._elastic.announce(self._agreed)

    def _move(self, received: Mapping[str, Any]) -> None:
        trainer, states = self._trainer, received["loaders"]
        position = _position.epoch_and_batch(trainer)
        divides = received["groups"] != self._sharding.groups
        if divides:
            self._sharding.divide(received["groups"])
            divides = not self._elastic.active
        reloads = divides or received["reload"] != _position.reload_epochs(trainer)
        if reloads:
            _position.reload_data(trainer, received["reload"], training=divides)
        if position != self._before or reloads or (states and position[1]):
            _position.place_data(trainer, states)
            self._ahead = states, states
            self._remember_loaders()
            self.adoptions += 1
            log.info("took over the run in epoch %d before batch %d (had been at %s)", *position, self._before)

    def _divide_anew(self, manager: Manager) -> None:
        """At the start of an epoch all members know who has joined, and do the same about it."""
        if _position.epoch_and_batch(self._trainer)[1]:
            return
        groups = groups_needed(self._sharding.groups, manager.members)
        if groups != self._sharding.groups:
            with manager.pause("dividing the training data anew", FETCH_MAX_S):
                self._sharding.divide(groups)
                if self._elastic.active:
                    return
                _position.reload_data(self._trainer, [], training=True)
                _position.place_data(self._trainer, [])

    def _after_batch(self) -> None:
        self._remember_loaders()
        assert self._run_out is not None
        self._run_out()
        if _position.epoch_is_over(self._trainer):
            self._report_unseen()

    def _remember_loaders(self) -> None:
        if _position.reads_ahead(self._trainer):
            self._ahead = _position.loader_states(self._trainer), self._ahead[0]

    # ------------------------------------------------------------ what was not read

    def _count(self, manager: Manager) -> None:
        """Should the step go on in another quorum, this batch is counted as one of the quorum it was begun in."""
        self._first = self._trainer.global_rank == 0 and manager.hooks.leads
        if not self._elastic.active and not self._uneven:
            self.unseen.count(manager.hooks.participants, self._sharding.groups)

    def _report_unseen(self) -> None:
        text = self.unseen.epoch_ended(_position.epoch_and_batch(self._trainer)[0])
        if text and self._first:
            log.warning("%s", text)
