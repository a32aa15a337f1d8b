"""`Publisher`: what was written for a step is put in its place once every replica is known to hold that step (R6).

How it works. A commit may have reached the writer alone; if it dies then, the others go on from the step before, and a
checkpoint of a step that was never made would stand there. So a file (`PlacedFile`), or a folder, is written beside its
place, and put there when the vote of the next step has shown that all hold the one that it is of. In a quorum of one
all hold it at once. What is held when the run ends is put in its place by the vote on leaving. What
is deleted to make room waits in the same line, so there is always a checkpoint, whoever dies and when.

When training has ended in agreement there are no votes any more, nobody makes good what a leader has not written, and
nobody waits for it. All replicas hold the same then, so each of them writes such a file (`write_in_place`): it is there
when the script goes on, on every replica.

Invariants: nothing is put in its place twice; per name only the newest is held. Threads: the training thread.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import re
import shutil
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ft_core.loop.window import StepWindow

log = logging.getLogger("ft_core")


_number = itertools.count()


def _mine() -> str:
    return f"{socket.gethostname().replace('.', '_')}-{os.getpid()}-"


def _sweep(folder: str, name: str) -> None:
    """Remove what writers of `name` left that were killed in the middle; one that was frozen finds out."""
    pattern = re.compile(rf"\.{re.escape(name)}\.(?!{re.escape(_mine())})[^.]*-\d+-\d+\.writing")
    with contextlib.suppress(OSError):  # not worth failing for
        for left in filter(pattern.fullmatch, os.listdir(folder)):
            path = os.path.join(folder, left)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.remove(path)


@dataclass(frozen=True)
class PlacedFile:
    """A file that is written beside its place first: under a name of the writer's own, then under that of its step.

    So a former leader that was frozen in the middle of a write cannot touch what its successor writes, nor can half a
    file be put in its place.
    """

    target: str
    """Its place, on a local file system."""
    step: int
    """Of the state in it."""

    @property
    def beside(self) -> str:
        """Where it is, complete, before it is in its place: on the same file system, and not among the checkpoints."""
        return self._hidden(f"{self.step}.partial")

    def _hidden(self, end: str) -> str:
        folder, name = os.path.split(os.path.abspath(self.target))
        return os.path.join(folder, f".{name}.{end}")

    def write(self, write: Callable[[str], object]) -> None:
        """Write it beside its place.

        Args:
            write: writes it to the path that it is given.

        Raises:
            FileNotFoundError: it did not, or another leader has swept it away.
        """
        mine = self._hidden(f"{_mine()}{next(_number)}.writing")
        os.makedirs(os.path.dirname(mine), exist_ok=True)
        _sweep(*os.path.split(os.path.abspath(self.target)))
        try:
            write(mine)
            if not os.path.exists(mine):
                raise FileNotFoundError(
                    f"nothing is at {mine} after the checkpoint {self.target} was written: what writes it chose "
                    "another path, or this replica stood still, and another one writes the job's checkpoints now"
                )
            os.replace(mine, self.beside)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(mine)
            raise

    def write_in_place(self, write: Callable[[str], object]) -> None:
        """Write it to its place at once, whole or not at all. Several replicas that hold the same may do it at a time.

        Args:
            write: writes it to the path that it is given.
        """
        mine = self._hidden(f"{_mine()}{next(_number)}.writing")
        os.makedirs(os.path.dirname(mine), exist_ok=True)
        try:
            write(mine)
            os.replace(mine, self.target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(mine)
            raise

    def place(self) -> None:
        """Put it in its place; nothing if that was done."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.beside, self.target)

    def discard(self) -> None:
        """Remove it, if it is still beside its place."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.beside)


@dataclass(frozen=True)
class PlacedFolder:
    """A folder that all ranks of a group write, beside its place first; as `PlacedFile`."""

    parent: str
    """Where it is before it is in its place: on the same file system, and not among the checkpoints."""
    name: str
    step: int
    """Of the state in it."""

    @property
    def beside(self) -> str:
        """Where it is when it is complete."""
        return os.path.join(self.parent, f".{self.name}.{self.step}.partial")

    def begin(self, share: Callable[[str], str], *, first: bool) -> str:
        """Where the group writes, which no other writer has; the folder is not there yet.

        Args:
            share: returns what the first rank of the group calls it with; on all ranks.
            first: this is the first rank.
        """
        mine = os.path.join(self.parent, f".{self.name}.{_mine()}{next(_number)}.writing")
        if first:
            _sweep(self.parent, self.name)
        return share(mine)

    def complete(self, writing: str) -> None:
        """It is written, to `writing`. On the first rank."""
        shutil.rmtree(self.beside, ignore_errors=True)
        os.rename(writing, self.beside)

    def discard(self) -> None:
        """Remove it, if it is still beside its place."""
        shutil.rmtree(self.beside, ignore_errors=True)


@dataclass(frozen=True)
class Held:
    """Something that is written, and not in its place."""

    place: Callable[[], object]
    """Puts it there."""
    step: int
    """Has to be stable first."""
    discard: Callable[[], object]
    """Removes it."""
    work: Future[object] | None
    """Writes it still; None: it is written."""


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

    def hold(
        self, name: str, place: Callable[[], object], discard: Callable[[], object],
        work: Future[object] | None = None,
    ) -> None:  # fmt: skip
        """Something of the present step was written: put it in its place when it may be there, perhaps at once."""
        manager = self._window.manager
        self._held.pop(name, None)
        self._held[name] = Held(place, -1 if manager is None else manager.current_step(), discard, work)
        self._window.after_vote = self.publish
        atexit.register(self._at_exit)
        self.publish()

    def drop(self, name: str) -> None:
        """It is written anew, or removed."""
        if (held := self._held.pop(name, None)) is not None:
            held.discard()

    def drop_step(self, step: int) -> None:
        """Somebody else writes again what is of this step, under the same name."""
        self._held = {name: held for name, held in self._held.items() if held.step != step}

    def forget(self) -> None:
        """The others' state is taken over. What they have not lost they have written; the rest is not theirs."""
        for name, held in self._held.items():
            log.info("%s is not put in its place: others have trained on without this replica, and write it", name)
            held.discard()
        self._held = {}

    def publish(self) -> None:
        """Put in place what all replicas are known to hold."""
        manager = self._window.manager if self._held else None
        alone = manager is None or not manager.quorum_id or manager.num_participants() <= 1
        for name, held in list(self._held.items()):
            stable = alone or (manager is not None and manager.stable_step() >= held.step)
            if stable and (held.work is None or held.work.done()):
                self._place(name)
        if not self._held:
            self._window.after_vote = None
            atexit.unregister(self._at_exit)

    def publish_all(self) -> None:
        """Put everything in place: this process reads it next."""
        self.finish()
        for name in list(self._held):
            self._place(name)

    def finish(self) -> None:
        """Wait for what is still being written."""
        for held in self._held.values():
            if held.work is not None:
                held.work.exception()

    def _place(self, name: str) -> None:
        held = self._held.pop(name)
        error = None if held.work is None else held.work.exception()
        if error is None:
            held.place()
        else:  # the step that wrote it is long over: nobody is there to take the error
            log.error("%s could not be written, and training goes on", name, exc_info=error)
            held.discard()

    def _at_exit(self) -> None:
        """The script ends without ending the run: the last vote, on leaving, shows whether all hold the step."""
        self._leave()
        for name in self._held:
            log.warning("%s is not put in its place: its last step may be this replica's alone", name)
