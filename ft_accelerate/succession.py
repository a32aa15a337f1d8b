"""Runs of one process, one after the other: each meets the other groups in a room of its own, and counts steps on.

How it works. A second run of a script (another Accelerator, or `free_memory` and `prepare`) begins at the step at which
the one before ended. So a replica that has not made all of that is behind, and takes over the others' model; it could
be the one whose model all take over otherwise. What a script sees (`committed_steps`, checkpoints) is counted from the
beginning of the run.

Invariant: one run at a time; the name of a replica group is taken once. Threads: the training thread.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from ft_core.protocol.lineage import fold_lineage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_accelerate.run import Run
    from ft_core import Manager

log = logging.getLogger("ft_accelerate")


class Succession:
    """Of one process."""

    def __init__(self) -> None:
        self._run: weakref.ref[Run] | None = None
        """The one whose Manager was started last."""
        self._next = 0
        """Number of the next run: they meet in rooms of that name."""
        self._carried: Mapping[str, int] = {}
        """The Manager's state at the end of the last one."""

    def __repr__(self) -> str:
        return f"Succession({self._next} runs, {self._carried.get('step', 0)} steps)"

    def begin(self, run: Run, number: int) -> int:
        """A run begins; the one before ends, if it has not. Returns the run's number, `number` or higher."""
        before = self._run() if self._run is not None else None
        if before is not None and before is not run:
            before.superseded()
        self._run, number = weakref.ref(run), max(number, self._next)
        self._next = number + 1
        return number

    def end(self, manager: Manager) -> None:
        """A run ends."""
        self._carried = manager.state_dict()

    def carry(self, manager: Manager, group: int) -> int:
        """Tell a run's Manager where the run before ended. Returns the step, 0 if there was none.

        Args:
            manager: that has had no quorum.
            group: number of this replica group. Each has a lineage of its own, as at the start of a job: the script may
                have drawn a new model.
        """
        step = self._carried.get("step", 0)
        if step:
            manager.load_state_dict({**self._carried, "lineage": fold_lineage(step, group, 0, ())})
        return step
