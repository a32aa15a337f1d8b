"""Who writes: one replica group, the leader, saves and feeds the trackers; its first rank is the main process.

How it works. The leader is the first participant of the quorum, so all members know it without a word. Before the first
quorum a provisional leader does what a script writes at its start: the group with the lowest number, unless the
lighthouse says that a quorum trains already. When training has ended, who led goes on to lead.

A leader may die while it saves. So each replica remembers what the leader has been told to write since the last commit
(references: the state changes with the next commit only), and a new leader writes that again before it goes on.

Invariants: at most one group leads in a quorum; that changes only in `opened`. Threads: the training thread.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ft_accelerate.patience import trains_already

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_accelerate.run import Run

log = logging.getLogger("ft_accelerate")
MAX_MISSED = 16
"""Saves remembered since the last commit; more are not made good after the leader's death."""


class Leadership:
    """Of one accelerator.

    Args:
        run: of this replica.
        changed: called with True when this group begins to lead, with False when it no longer does.
    """

    def __init__(self, run: Run, changed: Callable[[bool], None]) -> None:
        self._run = run
        self._changed = changed
        self._leads: bool | None = None
        self._missed: list[tuple[str, Callable[[], Any], int]] = []
        """Name, how it is written, and after how many steps; at most MAX_MISSED."""

    def __repr__(self) -> str:
        return f"Leadership({self._leads}, {len(self._missed)} writes missed)"

    @property
    def leads(self) -> bool:
        """This group writes."""
        if self._leads is None:
            self._leads = self._run.group == 0 and not self._trains_without_us()
        return self._leads

    def _trains_without_us(self) -> bool:
        # Not this group's own earlier process, nor an earlier run of this one: their leases may stand for a moment.
        known = trains_already(self._run.plugin.address, self._run.plugin.name)
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0 if known is None else known

    def opened(self) -> None:
        """A quorum was opened: elect, and make good what the former leader may not have written."""
        manager = self._run.manager
        assert manager is not None
        leads = manager.participating_rank() == 0
        before, self._leads = self._leads, leads
        # Kept until a commit: the leader's death may show only in the step after this window was opened with it.
        missed = self._missed = [item for item in self._missed if item[2] == self._run.committed_steps]
        if leads == bool(before):
            return
        self._missed = []
        if leads:
            log.info("%s saves and logs from step %d on", manager.replica_id, manager.current_step())
        self._changed(leads)
        for name, write, _steps in missed if leads else ():
            with self._run.pause(f"saving {name}, which the former leader may not have saved"):
                write()

    def writing(self, name: str, write: Callable[[], Any]) -> Any:
        """Write if this group leads; otherwise remember how, in case that the leader dies.

        Args:
            name: of what is written.
            write: writes it, over what is there.

        Returns:
            What `write` returns; None where nothing was written.
        """
        if self.leads:
            with self._run.pause(f"saving {name}"):
                return write()
        if len(self._missed) < MAX_MISSED:
            self._missed.append((name, write, self._run.committed_steps))
        return None
