"""All replicas stop after the same step, and none is left waiting.

How it works. Each replica decides for itself when its training ends. Whoever has left its loop takes part in further
commit votes, with STOP raised and a veto, so nobody's state changes any more. A replica that wanted to go on meets it
in its next vote: its step is vetoed, it sees that all stop (`Manager.stop_agreed`), and ends with the same state.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import FaultToleranceError, JobFinishedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.manager import Manager


class StopTogether(FaultToleranceError):
    """The reason of the vetoes at the end: some replica has ended its training."""


def stop_together(manager: Manager, opened: Callable[[], None], voted: Callable[[], object] = lambda: None) -> None:
    """Take part in votes until everybody knows that training ends; at the end of training, between two steps.

    Args:
        manager: of this rank.
        opened: called after each `start_quorum`.
        voted: called after each vote: a vote that a lighthouse is missed in, say, does not end the training yet.

    Raises:
        QuorumTimeoutError, RefusedError: there is no quorum any more.
    """
    if manager.quorum_id == 0:
        return
    manager.request_stop()
    manager.hooks.trains_on(None)
    while not manager.stop_agreed:
        try:
            manager.start_quorum(shrink_only=True)
        except JobFinishedError:
            return  # the others have agreed without this one
        opened()
        manager.report_error(StopTogether("training has ended"))
        try:
            manager.should_commit()
        except RuntimeError:  # max_retries: these vetoes are no failures
            if not manager.stop_agreed:
                raise
        voted()
