"""How a run ends: all replicas stop after the same step, or this one leaves the others. A part of `Run`.

How it works. Who ends its training takes part in further fences, with STOP raised and a veto, until everybody knows.

Invariant: a run ends once; afterwards nothing is communicated. Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import FaultToleranceError, JobFinishedError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from ft_accelerate.data import Position
    from ft_accelerate.elastic import Elastic
    from ft_accelerate.kept import Kept
    from ft_accelerate.succession import Succession
    from ft_core import Manager


class StopTogether(FaultToleranceError):
    """The reason of the vetoes at the end: some replica has ended its training."""


class Ending:
    """Mixed into `Run`."""

    manager: Manager | None
    after_vote: Callable[[], None] | None
    elastic: Elastic | None
    left: bool
    _agreed_in: int
    _ended: bool
    _kept: Kept
    _open: bool
    _opened: Callable[[], None]
    _pauses: contextlib.ExitStack
    _runs: Succession
    _why_ended: str

    if TYPE_CHECKING:

        @property
        def _room(self) -> str: ...

        @property
        def unsettled(self) -> bool: ...  # noqa: D102 - Run's

        def vote(self) -> bool: ...  # noqa: D102 - Run's

        def _agree_on(self, position: Position | None, manager: Manager) -> None: ...

    def end(self) -> None:
        """All replicas stop after the same step, then this one leaves. A replica that wanted to go on stops too."""
        manager = self.manager
        if manager is None or self._ended:
            self._ended = True
            return
        self._pauses.close()
        if manager.quorum_id:
            self._stop_together(manager)
        self._leave("finished", finished=True)

    def _stop_together(self, manager: Manager) -> None:
        """Take part in further fences, with STOP raised and a veto, until everybody knows."""
        if self._open and self.unsettled:
            self.vote()  # a backward that no step followed
        manager.request_stop()
        while not manager.stop_agreed:
            try:
                manager.start_quorum(self._room, shrink_only=True)
            except JobFinishedError:
                return  # the others have agreed without this one
            if manager.quorum_id != self._agreed_in:
                self._agree_on(None, manager)
            manager.report_error(StopTogether("training has ended"))
            try:
                manager.should_commit()
            except RuntimeError:  # max_retries: these vetoes are no failures
                if not manager.stop_agreed:
                    raise

    def leave(self) -> None:
        """The script ends, and did not say so."""
        if self.manager is not None and not self._ended:
            self._leave("the script ends", finished=False)

    def leave_others(self, why: str) -> None:
        """This replica ends its training, and another one leads."""
        self._why_ended, self.left = why, True
        self._leave(why, finished=False)
        self._opened()

    def _leave(self, reason: str, *, finished: bool) -> None:
        manager, self._ended = self.manager, True
        assert manager is not None
        self._pauses.close()
        self._runs.end(manager)
        manager.leave(reason, finished=finished)
        if self.after_vote is not None:
            self.after_vote()
        manager.shutdown()
        if self.elastic is not None:
            self.elastic.release()
        self._kept.owner = None
