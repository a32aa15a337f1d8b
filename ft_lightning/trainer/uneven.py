"""`UnevenEnd`: a training loader ends before the others' in an epoch, and `on_exhausted` says what follows.

How it works. After the last batch of each epoch, between two batches, `run_out` lets ft_core's policy have its way:
"shadow" takes part in the others' steps with weight zero, and applies them as Lightning does (precision, clipping,
hooks of the optimizer step, schedulers that follow steps, counts), until all are out of data; with "stop_all" that is
one step, after which the others' epochs end, too; "leave" leaves the job, and `fit` ends here. Schedulers that follow
epochs wait for that.

As the replicas' batches are not the same, their positions need not be (`Takeover.position` is None then). A replica
that is healed while it shadows takes the others' progress; if they are in another epoch by then, it goes on there.

Invariants: the steps of an epoch are all made, here and elsewhere, before anything of its end happens.
Threads: the training thread.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError
from ft_lightning import stopping
from ft_lightning._compat import position as _position

if TYPE_CHECKING:
    from ft_core import Manager
    from ft_core.loop.window import StepWindow

log = logging.getLogger("ft_lightning")


class UnevenEnd:
    """The end of this replica's training loader, epoch by epoch, while `fit` runs.

    Args:
        strategy: whose.
        policy: `on_exhausted`; None: nothing of this.
    """

    def __init__(self, strategy: Any, policy: str | None) -> None:
        self._strategy = strategy
        self.policy = policy
        self.left = False
        """This replica has left the job; `fit` ends."""
        self._done = False
        """The end was handled in this epoch."""
        self._applied = False
        self._lengths: tuple[Any, Any] | None = None
        """The lengths of this replica's own epochs, while the others' end."""

    def __repr__(self) -> str:
        return f"UnevenEnd({self.policy}, left={self.left})"

    def check(self, module: Any) -> None:
        """Refuse what it does not go with.

        Raises:
            ConfigError: manual optimization, or a group of several ranks.
        """
        self.left = self._done = False
        self._lengths = None
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
        manager: Manager | None = self._strategy.manager
        if self.policy is None or self._done or self.left or manager is None or manager.stop_agreed:
            return False
        return _position.data_is_over(self._trainer)

    def batch_begins(self) -> None:
        """Restore the length of the epoch; before each batch."""
        self._done = False
        if self._lengths is not None:
            lengths, self._lengths = self._lengths, None
            _position.set_lengths(self._trainer, lengths)

    def voted(self) -> None:
        """After each vote: another replica may have ended the epoch for all."""
        manager: Manager = self._strategy.manager
        if self.policy is not None and manager.all_exhausted:
            self._lengths = self._lengths or _position.lengths(self._trainer)
            _position.end_epoch(self._trainer)

    def run_out(self) -> None:
        """Between two batches, if `pending`.

        Raises:
            QuorumTimeoutError, RefusedError: no quorum could be had.
            SystemExit: (0) this replica was asked to drain, or the job is over.
        """
        if not self.pending:
            return
        self._done = True
        self._lengths = self._lengths or _position.lengths(self._trainer)
        trainer, manager = self._trainer, self._strategy.manager
        if self.policy == "leave":
            self._leave(manager)
        else:
            before = _position.epoch_and_batch(trainer)[0]
            while not manager.stop_agreed and not self._shadow(manager):
                if not self._applied:
                    _position.count_batch(trainer)  # a vetoed one is counted, too
            stopping.stop_as_agreed(manager, trainer)
            if manager.stop_agreed or _position.epoch_and_batch(trainer)[0] != before:
                return  # all end here; or it was healed by those who are further on
        _position.end_epoch(trainer)
        _position.step_epoch_schedulers(trainer)

    def _shadow(self, manager: Manager) -> bool:
        """One attempt; whether it was the last."""
        self._applied = False

        window: StepWindow = self._strategy.window

        def attempt() -> bool:
            opened = functools.partial(window.entered, None)
            return manager.hooks.shadow_step(self._apply, ends=self.policy == "stop_all", opened=opened)

        with self._strategy._takeover.staying():
            return window.wait_for(attempt)

    def _apply(self) -> None:
        self._applied = True
        _position.count_batch(self._trainer)
        _position.end_epoch(self._trainer)  # a heal may have brought the position of somebody in the middle
        self._strategy.apply_committed()

    def _leave(self, manager: Manager) -> None:
        _position.end_fit(self._trainer)
        if len(manager.members) > 1:  # else it is the last one, and ends the job
            log.info("%s: out of data: leaves with step %d", manager.replica_id, manager.current_step())
            manager.leave("out of data")
            self.left = True
            self._strategy.leader.step_down()
