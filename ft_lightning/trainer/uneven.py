"""`TrainerUnevenEnd`: a training loader ends before the others' in an epoch, and `on_exhausted` says what follows.

How it works. It is the kit's `UnevenEnd` for the Trainer's loop: after the last batch of each epoch `run_out` lets the
policy have its way. The others' steps are applied as Lightning does (precision, clipping, hooks of the optimizer step,
schedulers that follow steps, counts). Where another replica ends the epoch, the Trainer is told that it has no more
batches. Schedulers that follow epochs wait for the end of all.

As the replicas' batches are not the same, their positions need not be (`Takeover.position` is None then). A replica
that is healed while it shadows takes the others' progress; if they are in another epoch by then, it goes on there.

Invariants: the steps of an epoch are all made, here and elsewhere, before anything of its end happens.
Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError
from ft_core.loop.uneven import UnevenEnd
from ft_lightning import stopping
from ft_lightning._compat import position as _position

if TYPE_CHECKING:
    from ft_core import Manager
    from ft_core.loop.position import Position
    from ft_core.loop.window import StepWindow


class TrainerUnevenEnd(UnevenEnd):
    """The end of this replica's training loader, epoch by epoch, while `fit` runs.

    Args:
        strategy: whose.
        window: of this call of `fit`.
        policy: `on_exhausted`; None: nothing of this.
    """

    def __init__(self, strategy: Any, window: StepWindow, policy: str | None) -> None:
        super().__init__(window, self._leave_job, self._apply_step, self._not_committed)
        self._strategy = strategy
        self._lengths: tuple[Any, Any] | None = None
        """The lengths of this replica's own epochs, while the others' end."""
        self.begin(policy)

    def check(self, module: Any) -> None:
        """Refuse what it does not go with.

        Raises:
            ConfigError: manual optimization, or a group of several ranks.
        """
        if self.policy is None:
            return
        if self._strategy.elastic.active:
            raise ConfigError(
                f"on_exhausted={self.policy!r} with elastic data: there all replicas run out together; leave "
                "on_exhausted out"
            )
        if not module.automatic_optimization:
            raise ConfigError(
                f"on_exhausted={self.policy!r} with automatic_optimization=False: nobody but training_step knows how a "
                "step of the others is applied; use automatic optimization, or leave on_exhausted out"
            )
        if self._strategy.world_size > 1:
            raise ConfigError(
                f"on_exhausted={self.policy!r} with {self._strategy.world_size} ranks per replica group: their loaders "
                "would have to end together; use one device per group, or leave on_exhausted out"
            )

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    @property
    def pending(self) -> bool:
        """The epoch's last batch is done here, and `run_out` comes next: nothing of the epoch's end may happen yet."""
        if self.policy is None or self.done or self.left or self._window.start_manager().stop_agreed:
            return False
        return _position.data_is_over(self._trainer)

    def batch_begins(self) -> None:
        """Restore the length of the epoch; before each batch."""
        self.done = False
        if self._lengths is not None:
            lengths, self._lengths = self._lengths, None
            _position.set_lengths(self._trainer, lengths)

    def voted(self) -> None:
        """After each vote: another replica may have ended the epoch for all."""
        super().voted()
        if self.over:
            self._lengths = self._lengths or _position.lengths(self._trainer)
            _position.end_epoch(self._trainer)

    def run_out(self, position: Position | None = None) -> None:
        """As the kit's, if `pending`; then the epoch is over here."""
        if not self.pending:
            return
        self._lengths = self._lengths or _position.lengths(self._trainer)
        trainer, manager = self._trainer, self._window.start_manager()
        before = _position.epoch_and_batch(trainer)[0]
        if self.policy == "leave":
            _position.end_fit(trainer)
        super().run_out(position)
        if self.policy != "leave":
            stopping.stop_as_agreed(manager, trainer)
            if manager.stop_agreed or _position.epoch_and_batch(trainer)[0] != before:
                return  # all end here; or it was healed by those who are further on
        _position.end_epoch(trainer)
        _position.step_epoch_schedulers(trainer)

    def _attempt(self, position: Position | None) -> bool:
        with self._strategy._takeover.staying():
            return super()._attempt(position)

    def _concluded(self, manager: Manager) -> None:
        self._strategy.leader.voted(manager)

    def _apply_step(self) -> None:
        _position.count_batch(self._trainer)
        _position.end_epoch(self._trainer)  # a heal may have brought the position of somebody in the middle
        self._strategy.apply_committed()

    def _not_committed(self) -> None:
        _position.count_batch(self._trainer)  # as the others do

    def _leave_job(self, _: str) -> None:
        self._window.start_manager().leave("out of data")
        self._strategy.leader.step_down()
