"""`Runs`: the training runs of one process, one after the other; each meets the other groups in a room of its own.

How it works. A second run of a script (another Accelerator, or `free_memory` and `prepare`) counts on from the step at
which the one before ended (`ft_core.loop.runs`). What a script sees (`committed_steps`, checkpoints) is counted from
the beginning of the run.

Invariant: one run at a time; the name of a replica group is taken once. Threads: the training thread.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ft_core.loop.runs import carried_over

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core import Manager


class Runs:
    """The runs that this process has begun."""

    def __init__(self) -> None:
        self._supersede: weakref.WeakMethod[Any] | None = None
        """Ends the run whose Manager was started last."""
        self._next = 0
        """Number of the next run, which names its room."""
        self._ended_with: Mapping[str, int] = {}
        """The Manager's state at the end of the last run."""

    def __repr__(self) -> str:
        return f"Runs({self._next} begun, {self._ended_with.get('step', 0)} steps)"

    def begin(self, supersede: Callable[[], None], number: int) -> int:
        """A run begins; the one before ends, if it has not. Returns the run's number, `number` or higher.

        Args:
            supersede: a method of the run, which is not kept alive; called when another run begins.
            number: of the run, as far as it knows.
        """
        before = self._supersede() if self._supersede is not None else None
        if before is not None and before != supersede:
            before()
        self._supersede, number = weakref.WeakMethod(supersede), max(number, self._next)
        self._next = number + 1
        return number

    def end(self, manager: Manager) -> None:
        """Note the Manager's state: a run ends."""
        self._ended_with = manager.state_dict()

    def resume(self, manager: Manager, group: int) -> int:
        """Let the Manager of a new run count on from where the run before ended. Returns the step, 0 if there was none.

        Args:
            manager: that has had no quorum.
            group: number of this replica group.
        """
        state = carried_over(self._ended_with, group)
        if state:
            manager.load_state_dict(state)
        return state.get("step", 0)


_runs: Runs | None = None


def runs_of_this_process() -> Runs:
    """The runs that this process has begun; none before the first one."""
    global _runs
    _runs = _runs or Runs()
    return _runs
