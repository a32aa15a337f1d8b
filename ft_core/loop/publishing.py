"""`Publisher`: what was written for a step is put in its place once every replica is known to hold that step (R6).

How it works. A commit may have reached the writer alone; if it dies then, the others go on from the step before, and a
checkpoint of a step that was never made would stand there. So a file (`PlacedFile`), or a folder, is written beside its
place, and put there when the vote of the next step has shown that all hold the one that it is of. In a quorum of one
all hold it at once. What is held when the run ends is put in its place by the vote on leaving. What
is deleted to make room waits in the same line, so there is always a checkpoint, whoever dies and when.

Invariants: nothing is put in its place twice; per name only the newest is held. Threads: the training thread.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.loop.window import StepWindow

log = logging.getLogger("ft_core")


@dataclass(frozen=True)
class PlacedFile:
    """A file that is written beside its place first."""

    target: str
    """Its place, on a local file system."""

    @property
    def beside(self) -> str:
        """Where it is written: on the same file system, and not among the checkpoints."""
        folder, name = os.path.split(os.path.abspath(self.target))
        return os.path.join(folder, f".{name}.partial")

    def place(self) -> None:
        """Put it in its place; nothing if that was done."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.beside, self.target)


@dataclass(frozen=True)
class Held:
    """Something that is written, and not in its place."""

    place: Callable[[], object]
    """Puts it there."""
    step: int
    """Has to be stable first."""


class Publisher:
    """What one replica has written and not put in its place yet.

    Args:
        window: of the run.
        leave: ends the run at the interpreter's exit, if the script has not.
    """

    def __init__(self, window: StepWindow, leave: Callable[[], None]) -> None:
        self._window, self._leave = window, leave
        self._held: dict[str, Held] = {}
        """By name, oldest first."""

    def __repr__(self) -> str:
        return f"Publisher(holds {', '.join(self._held) or 'nothing'})"

    def holds(self, name: str) -> bool:
        """That name is not in its place yet."""
        return name in self._held

    def hold(self, name: str, place: Callable[[], object]) -> None:
        """Something of the present step was written: put it in its place when it may be there, perhaps at once."""
        manager = self._window.manager
        self._held.pop(name, None)
        self._held[name] = Held(place, -1 if manager is None else manager.current_step())
        self._window.after_vote = self.publish
        atexit.register(self._at_exit)
        self.publish()

    def drop(self, name: str) -> None:
        """It is written anew, or removed."""
        self._held.pop(name, None)

    def drop_step(self, step: int) -> None:
        """Somebody else writes again what is of this step."""
        self._held = {name: held for name, held in self._held.items() if held.step != step}

    def forget(self) -> None:
        """The others' state is taken over. What they have not lost they have written; the rest is not theirs."""
        for name in self._held:
            log.info("%s is not put in its place: others have trained on without this replica, and write it", name)
        self._held = {}

    def publish(self) -> None:
        """Put in place what all replicas are known to hold."""
        manager = self._window.manager if self._held else None
        alone = manager is None or not manager.quorum_id or manager.num_participants() <= 1
        for name, held in list(self._held.items()):
            if alone or (manager is not None and manager.stable_step() >= held.step):
                del self._held[name]
                held.place()
        if not self._held:
            self._window.after_vote = None
            atexit.unregister(self._at_exit)

    def publish_all(self) -> None:
        """Put everything in place: this process reads it next."""
        for name, held in list(self._held.items()):
            del self._held[name]
            held.place()

    def _at_exit(self) -> None:
        """The script ends without ending the run: the last vote, on leaving, shows whether all hold the step."""
        self._leave()
        for name in self._held:
            log.warning("%s is not put in its place: its last step may be this replica's alone", name)
