"""`UnevenEnd`: what a replica does whose training data ends before the others': `on_exhausted`, `join_uneven_inputs`.

How it works. After the last batch of an epoch, between two windows, `run_out` lets ft_core's policy have its way.
"shadow": this replica takes part in the others' steps with weight zero until all are out of data. What a step does is
known to the script's loop alone (clipping, several schedulers, averages of its own), so nothing is applied here: the
replica trails, and is healed by the others before the epoch ends, with everything that `healed_state` knows.
"stop_all": it takes part in one more attempt, which nobody commits and after which all loops end. "leave": it leaves
the job, and its loops end here.

Prepared loaders call `run_out` at the end of their loops; for a loader of the script's own the context of
`join_uneven_inputs` does. The processes of a group end together, with the first of them: prepared loaders ask each
other after each batch that they read ahead (`ends`).

Invariants: a replica is out of data between two windows only. Positions of replicas in one epoch are compared by
their batches, also where their numbers of batches differ. Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

from ft_accelerate import _compat
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core import Manager
    from ft_core.loop.position import Position
    from ft_core.loop.window import StepWindow

log = logging.getLogger("ft_accelerate")


class UnevenEnd:
    """The end of this replica's data, epoch by epoch, in one run after the other.

    Args:
        window: whose attempts this replica takes part in.
        policy: `on_exhausted`; None: nothing of this.
        leave_others: ends the run of this replica, while the others go on; called with the reason.
    """

    def __init__(self, window: StepWindow, policy: str | None, leave_others: Callable[[str], None]) -> None:
        self._window = window
        self._given = policy
        self._leave_others = leave_others
        window.on_unread, window.on_vote = self._unread, self._voted
        self.begin()

    def begin(self) -> None:
        """Forget the last run: another one begins."""
        self.policy = self._given
        """`on_exhausted`, or "shadow" in the context of join_uneven_inputs; None: nothing of this."""
        self.over = False
        """Another replica has ended this epoch for all."""
        self.done = False
        """This replica ran out, and has trained on nothing since."""
        self.joined = False
        """In the context of join_uneven_inputs: loaders that were not prepared count."""
        self.optimizers = 1
        """How many optimizers were prepared."""

    def __repr__(self) -> str:
        return f"UnevenEnd({self.policy}, done={self.done})"

    def check(self) -> None:
        """Refuse what does not go with a policy.

        Raises:
            ConfigError: several models, or several optimizers.
        """
        for count, what in ((len(self._window.models), "models"), (self.optimizers, "optimizers")):
            if count > 1:
                raise ConfigError(
                    f"on_exhausted={self.policy!r} (or join_uneven_inputs) with {count} prepared {what}: who is out of "
                    "data cannot know which of them the others' next step is of; prepare one model and one optimizer, "
                    "or let all replicas have equally many batches (even_batches=True, elastic_data=True)"
                )

    def loop_begins(self) -> None:
        """A prepared loader is read for training.

        Raises:
            ConfigError: as `check`.
        """
        self.over = False
        if self.policy is not None:
            self.check()

    def _unread(self) -> None:
        """A window opens in a forward, outside of the loops over prepared loaders.

        Raises:
            ConfigError: in the context, in a group of several processes: they have to end together.
        """
        if self.joined and self._window.ranks > 1:
            raise ConfigError(
                f"join_uneven_inputs with {self._window.ranks} processes per replica group around a data loader that "
                "was not prepared: the processes of a group have to end together, and only a prepared loader asks the "
                "others; prepare it"
            )

    def _voted(self, manager: Manager, _: bool) -> None:
        """There was a vote: this replica trained, and another one may have ended the epoch."""
        self.done = False
        self.over = self.policy is not None and manager.all_exhausted

    def ends(self, here: bool) -> bool:
        """Whether the data ends for this group: with it `here`, or on another of its processes."""
        if self.policy is None or self._window.ranks == 1:
            return here
        return self._window.inside.any(here, self._window.device)

    def run_out(self, position: Position | None) -> None:
        """This replica has no data left in this epoch: do what the policy says. Between two batches.

        Args:
            position: of the loader that has ended; moved to the others'. None: of a loader that was not prepared.

        Raises:
            ConfigError: as `check`.
            QuorumTimeoutError, RefusedError: no quorum could be had.
            SystemExit: (0) the others have finished, or this replica was asked to drain.
        """
        window, manager = self._window, self._window.manager
        if self.policy is None or manager is None or window.stopped or window.ended:
            return
        self.check()
        self.done = True
        window.close()
        window.drop_gradients()
        if self.policy == "leave":
            self._leave(manager)
            return
        while not self._shadow(manager, position):
            pass
        window.drop_gradients()

    def _shadow(self, manager: Manager, position: Position | None) -> bool:
        """One attempt; whether it was the last."""
        window = self._window
        opened = functools.partial(window.entered, position)
        over = window.wait_for(lambda: manager.hooks.shadow_step(None, ends=self.policy == "stop_all", opened=opened))
        window.concluded(manager)
        return over or window.stopped

    def _leave(self, manager: Manager) -> None:
        if len(manager.members) > 1:  # else it is the last one, and ends the job
            log.info("%s: out of data: leaves with step %d", manager.replica_id, manager.current_step())
            self._leave_others("this replica ran out of data (on_exhausted='leave')")
        self._window.stopped = True


@contextlib.contextmanager
def joined(
    accelerator: Any, out: UnevenEnd, joinables: Any, even_batches: bool | None, elastic: Callable[[], bool]
) -> Iterator[None]:
    """Train inside on loaders of different lengths (`join_uneven_inputs`).

    Args:
        accelerator: whose loaders are read inside.
        out: of this accelerator's run.
        joinables: the model, and perhaps the optimizer.
        even_batches: of loaders inside; None: as the accelerator says.
        elastic: whether the data that is trained on is elastic: it ends everywhere at once.

    Raises:
        ConfigError: other joinables, or what `UnevenEnd.check` refuses.
    """
    window, before, policy = out._window, accelerator.even_batches, out.policy
    ours = [*window.models, *accelerator._optimizers, *(optimizer.optimizer for optimizer in accelerator._optimizers)]
    for item in joinables:
        if not any(item is mine for mine in ours):
            raise ConfigError(
                f"join_uneven_inputs([{type(item).__name__}]): not a model or an optimizer that this Accelerator has "
                "prepared for training; pass what prepare() returned"
            )
    even = before if even_batches is None else even_batches
    _make_even(accelerator, even)
    if not even:
        out.policy, out.done, out.joined = "shadow", False, True
        out.check()
    try:
        yield
        if not even and not out.done and window.training and not elastic():
            out.run_out(None)
            accelerator.step = 0  # what was accumulated is dropped, here and elsewhere
    finally:
        _make_even(accelerator, before)
        out.policy, out.joined = policy, False


def _make_even(accelerator: Any, even: bool) -> None:
    """All processes get equally many batches of the prepared loaders, or not, from their next epoch on."""
    accelerator.even_batches = even
    for loader in accelerator._dataloaders:
        for base in getattr(loader, "_bases", [loader]):
            shard = _compat.shard_of(base)
            if hasattr(shard, "even_batches"):
                shard.even_batches = even
