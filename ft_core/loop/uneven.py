"""`UnevenEnd`: a replica whose training data ends before the others' in an epoch, and what `on_exhausted` says follows.

How it works. After the last batch of an epoch, between two windows, `run_out` lets ft_core's policy have its way.
"shadow": this replica takes part in the others' steps with weight zero, until all are out of data. Where an adapter
knows what a step does, it applies each (`apply`); else nothing is applied here: the replica trails, and is healed by
the others before the epoch ends. "stop_all": it takes part in one more attempt, which nobody commits and after which
all epochs end. "leave": it leaves the job, or ends it, if it is the last one.

Invariants: a replica is out of data between two windows only; all steps of an epoch are made, here and elsewhere,
before `run_out` returns. Threads: the training thread.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from ft_core.loop.runs import PassedOverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.loop.position import Position
    from ft_core.loop.window import StepWindow
    from ft_core.manager import Manager

log = logging.getLogger("ft_core")


class UnevenEnd:
    """The end of this replica's data, epoch by epoch.

    Args:
        window: whose attempts this replica takes part in.
        leave_others: ends the run of this replica, while the others go on; called with the reason.
        apply: applies a step that the others have committed; None: this replica trails.
        vetoed: called after an attempt that nobody committed, before the next one.
    """

    def __init__(
        self,
        window: StepWindow,
        leave_others: Callable[[str], None],
        apply: Callable[[], None] | None = None,
        vetoed: Callable[[], None] = lambda: None,
    ) -> None:
        self._window, self._leave_others = window, leave_others
        self._apply, self._vetoed = apply, vetoed
        self.policy: str | None = None
        """`on_exhausted`; None: nothing of this."""
        self.over = False
        """Another replica has ended this epoch for all."""
        self.done = False
        """This replica ran out, and has trained on nothing since."""
        self.left = False
        """This replica has left the job."""
        self._applied = False
        self._took_part = False
        """There was a vote in the last attempt."""

    def __repr__(self) -> str:
        return f"UnevenEnd({self.policy}, done={self.done}, left={self.left})"

    def begin(self, policy: str | None) -> None:
        """Forget the last run: another one begins, with this policy."""
        self.policy, self.over, self.done, self.left = policy, False, False, False

    def voted(self) -> None:
        """There was a vote: this replica trained, and another one may have ended the epoch."""
        manager = self._window.manager
        self.done = False
        self.over = self.policy is not None and manager is not None and manager.all_exhausted

    def run_out(self, position: Position | None = None) -> None:
        """This replica has no data left in this epoch: do what the policy says. Between two batches.

        Args:
            position: of the loader that has ended; moved to the others'. None: it is not compared with the others'.

        Raises:
            QuorumTimeoutError, RefusedError: no quorum could be had.
            SystemExit: (0) the others have finished, or this replica was asked to drain.
        """
        self.done = True
        if self.policy == "leave":
            self._leave()
            return
        while not self._attempt(position):
            if not self._applied:
                self._vetoed()

    def _attempt(self, position: Position | None) -> bool:
        """One attempt of the others; whether it was the last."""
        window, ends = self._window, self.policy == "stop_all"
        manager = window.start_manager()
        if window.stopped:
            return True
        self._applied = self._took_part = False
        apply = None if self._apply is None else self._step
        opened = functools.partial(self._entered, position)
        window.trains_on(position)
        try:
            over = window.wait_for(lambda: manager.hooks.shadow_step(apply, ends=ends, opened=opened))
        except PassedOverError:
            return True  # the others have this run behind them
        window.concluded(manager)
        if self._took_part:
            self._concluded(manager)
        return over or window.stopped

    def _entered(self, position: Position | None) -> None:
        self._took_part = True
        self._window.entered(position)

    def _concluded(self, manager: Manager) -> None:
        """After each vote that this replica took part in without data."""

    def _step(self) -> None:
        assert self._apply is not None
        self._applied = True
        self._apply()

    def _leave(self) -> None:
        manager = self._window.start_manager()
        if len(manager.members) > 1:  # else it is the last one, and ends the job
            log.info("%s: out of data: leaves with step %d", manager.replica_id, manager.current_step())
            self._leave_others("this replica ran out of data (on_exhausted='leave')")
            self.left = True
