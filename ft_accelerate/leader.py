"""`Leadership`: one replica group, the leader, saves and feeds the trackers; its first rank is the main process.

How it works. The leader is the first participant of the quorum, so all members know it without a message. Before the
first quorum a provisional leader does what a script writes at its start: the group with the lowest number, unless, as
the lighthouse reports, a quorum trains already. When training has ended, who led goes on to lead.

A leader may die while it saves. So each replica remembers what the leader was to write since the last commit
(references: the state changes with the next commit only), and a new leader writes that again before it goes on.

A commit may have reached the leader alone, so a checkpoint is put in its place only when its step is stable (R6): the
commit vote of the next one has shown that all hold it. The last one is put there when the run ends. In a quorum of
one all hold it at once.

Invariants: at most one group leads in a quorum; that changes only in `opened`. Threads: the training thread.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from ft_core.loop.quorum_wait import others_train
from ft_core.runtime import notices

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_accelerate.window import StepWindow

log = logging.getLogger("ft_accelerate")
MAX_MISSED = 16
"""Saves remembered since the last commit; more are not redone after the leader's death."""


class Leadership:
    """Whether this group leads, and what a leader writes; one per accelerator.

    Args:
        window: of its run.
        name: of this replica group.
        changed: called with True when this group begins to lead, with False when it no longer does.
        leave: ends the run, if the script has not.
    """

    def __init__(
        self, window: StepWindow, name: str, changed: Callable[[bool], None], leave: Callable[[], None]
    ) -> None:
        self._window = window
        self._name = name
        self._changed = changed
        self._leave = leave
        self._leads: bool | None = None
        self._missed: list[tuple[str, Callable[[], Any], int]] = []
        """Name, how it is written, and at which step; at most MAX_MISSED."""
        self._held: dict[str, tuple[Callable[[], Any], int]] = {}
        """Written checkpoints: how each is put in its place, and the step that must be stable for that."""

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

    def forget(self) -> None:
        """The others' state is taken over. What they have not lost they have written; the rest is not theirs."""
        for name in self._held:
            log.info("%s is not put in its place: others have trained on without this replica, and write it", name)
        self._held = {}

    def _trains_without_us(self) -> bool:
        # Not this group's own earlier process, nor an earlier run of this one: their leases may stand for a moment.
        known = others_train(self._window.address, self._name)
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
            self._held = {name: held for name, held in self._held.items() if held[1] != self._step}
        self._missed = []
        if leads:
            step = manager.current_step()
            notices.say(
                f"{manager.replica_id} saves and logs from step {step} on", quiet=step <= 0 or self._window.rank > 0
            )
        self._changed(leads)
        for _name, write, _steps in missed if leads else ():
            write()

    # ------------------------------------------------------------ what is written is put in its place

    def _hold(self, name: str, place: Callable[[], Any]) -> None:
        manager = self._window.manager
        self._held[name] = place, -1 if manager is None else manager.current_step()
        self._window.after_vote = self.publish
        atexit.register(self._at_exit)
        self.publish()

    def publish(self) -> None:
        """Put in place what all replicas are known to hold."""
        manager = self._window.manager
        alone = manager is None or not manager.quorum_id or manager.num_participants() <= 1
        for name, (place, step) in list(self._held.items()):
            if alone or (manager is not None and manager.stable_step() >= step):
                del self._held[name]
                place()
        if not self._held:
            self._window.after_vote = None
            atexit.unregister(self._at_exit)

    def publish_all(self) -> None:
        """Put everything in place: this process reads it next."""
        for name, (place, _step) in list(self._held.items()):
            del self._held[name]
            place()

    def _at_exit(self) -> None:
        """The script ends without `end_training`: the last vote, on leaving, shows whether all hold the step."""
        self._leave()
        for name in self._held:
            log.warning("%s is not put in its place: its last step may be this replica's alone", name)

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
                self._held.pop(name, None)
                written = write()
                if place is not None:
                    self._hold(name, place)
                return written
        if len(self._missed) < MAX_MISSED:
            again = functools.partial(self.writing, name, write, place)
            self._missed.append((name, again, self._step))
        return None
