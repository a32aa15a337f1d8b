"""`Leadership`: one replica group, the leader, writes what is written once per job.

How it works. The leader is the first participant of the quorum, so all members know it without a message. Before the
first quorum a provisional leader does what a script writes at its start: the group with the lowest number, unless, as
the lighthouse reports, a quorum trains already. When training has ended, who led goes on to lead.

A leader may die while it saves. So each replica remembers what the leader was to write since the last commit
(references: the state changes with the next commit only), and a new leader writes that again before it goes on.

What it writes is put in its place by a `Publisher`, once all replicas are known to hold the step.

Invariants: at most one group leads in a quorum; that changes only in `opened`. Threads: the training thread.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from ft_core.loop.quorum_wait import others_train
from ft_core.runtime import notices

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.loop.publishing import Publisher
    from ft_core.loop.window import StepWindow

MAX_MISSED = 16
"""Saves remembered since the last commit; more are not redone after the leader's death."""


class Leadership:
    """Whether this group leads, and what a leader writes.

    Args:
        window: of its run.
        publisher: of this replica.
        changed: called with True when this group begins to lead, with False when it no longer does.
    """

    def __init__(self, window: StepWindow, publisher: Publisher, changed: Callable[[bool], None]) -> None:
        self._window = window
        self.publisher = publisher
        self._changed = changed
        self._leads: bool | None = None
        self._missed: list[tuple[str, Callable[[], Any], int]] = []
        """Name, how it is written, and at which step; at most MAX_MISSED."""

    def __repr__(self) -> str:
        return f"Leadership({self._leads}, {len(self._missed)} writes missed)"

    @property
    def leads(self) -> bool:
        """Whether this group writes."""
        if self._leads is None:
            self._leads = self._window.group == 0 and not self._trains_without_us()
        return self._leads

    @property
    def _step(self) -> int:
        """The step of the state that would be written now. A heal moves it on as well as this replica's own commits."""
        manager = self._window.manager
        return 0 if manager is None else manager.current_step()

    def _trains_without_us(self) -> bool:
        # Not this group's own earlier process, nor an earlier run of this one: their leases may stand for a moment.
        known = others_train(self._window.address, self._window.place.name)
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0 if known is None else known

    def opened(self) -> None:
        """A quorum was opened: elect, and redo what the former leader may not have written."""
        manager = self._window.manager
        assert manager is not None
        leads = not self._window.left and manager.participating_rank() == 0
        before, self._leads = self._leads, leads
        # Kept until a commit: the leader's death may show only in the step after this window was opened with it.
        missed = self._missed
        if missed:
            missed = self._missed = [item for item in missed if item[2] == self._step]
        if leads == bool(before):
            return
        if not leads:  # whoever leads now writes again what was to be written at this step
            self.publisher.drop_step(self._step)
        self._missed = []
        if leads:
            step = manager.current_step()
            notices.say(
                f"{manager.replica_id} saves and logs from step {step} on", quiet=step <= 0 or self._window.rank > 0
            )
        self._changed(leads)
        for _name, write, _steps in missed if leads else ():
            write()

    def writing(self, name: str, write: Callable[[], Any], place: Callable[[], Any] | None = None) -> Any:
        """Write if this group leads; otherwise remember how, in case that the leader dies.

        Args:
            name: of what is written.
            write: writes it, over what is there.
            place: puts it in its place, once all replicas are known to hold the step; None: `write` does.

        Returns:
            What `write` returns; None where nothing was written.
        """
        if self.leads:
            with self._window.pause(f"saving {name}"):
                self.publisher.drop(name)
                written = write()
                if place is not None:
                    self.publisher.hold(name, place)
                return written
        if len(self._missed) < MAX_MISSED:
            again = functools.partial(self.writing, name, write, place)
            self._missed.append((name, again, self._step))
        return None
