"""`TrainingRun`: one training run of a process, from its first model to its end, composed of the kit's parts.

How it works. `window` opens quorums and votes, `leadership` says who writes, `publisher` puts in place what was
written. The Manager is made with the first model, in the room of the process's nth run, and counts on from the step at
which the run before ended (`runs`). A run ends when all have agreed to (`end`), or for this replica alone (`leave`).

Invariant: a run ends once; afterwards nothing is communicated. Threads: the training thread.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from ft_core import Manager, default_process_group
from ft_core.errors import JobFinishedError, UsageError
from ft_core.loop.garbage import collect_once
from ft_core.loop.leadership import Leadership
from ft_core.loop.model import WindowedModel
from ft_core.loop.publishing import PlacedFile, Publisher
from ft_core.loop.runs import RUNS
from ft_core.loop.stopping import stop_together
from ft_core.loop.window import StepWindow, nothing_left
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from ft_core.loop.division import Division
    from ft_core.loop.replica_group import ReplicaGroup

log = logging.getLogger("ft_core")
KEY = "loop"
"""The name of a run's state in what donors hand out."""


class TrainingRun:
    """A run, on one rank.

    Args:
        place: of this process.
        options: arguments of the Manager; room_id: of the first run of the process.
        load, save: all state that must be equal on all replicas; `load` is called between two steps only.
        division: of the training data.
        changed: called with True when this group begins to lead, with False when it no longer does.
        opened: called after each quorum was opened.
        ended: said to who goes on after the end; in the words of the framework.
    """

    def __init__(
        self,
        place: ReplicaGroup,
        options: Mapping[str, Any],
        load: Callable[[Any], None],
        save: Callable[[], Any],
        *,
        division: Division,
        changed: Callable[[bool], None] | None = None,
        opened: Callable[[], None] | None = None,
        ended: str,
    ) -> None:
        self._options, self._functions, self._ended = options, (load, save), ended
        self._after_opening = opened
        self.window = StepWindow(place, self.start_manager, self._opened, division)
        self.publisher = Publisher(self.window, self.leave)
        self.leadership = Leadership(self.window, self.publisher, changed or _nothing)
        self.first_step = 0
        """The Manager's step when this run began, on all replicas alike."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.window!r})"

    @property
    def manager(self) -> Manager | None:
        """The Manager, once a model is wrapped."""
        return self.window.manager

    # ------------------------------------------------------------ set-up

    def start_manager(self) -> Manager:
        """The Manager; made when it is needed first, so that evaluation needs no lighthouse.

        Raises:
            SystemExit: (0) the others have finished.
            UsageError: training has ended.
        """
        window = self.window
        if window.manager is None:
            if window.ended:
                raise UsageError(f"{window.ended}: this run is over")
            RUNS.begin(self.superseded)
            collect_once()
            options = {
                **self._options, **self._place_of_store(), "rank": window.rank, "world_size": window.ranks,
                "room_id": RUNS.room(self._options.get("room_id") or DEFAULT_ROOM),
                "use_async_quorum": False,  # what a replica that is behind reads depends on the others' state
                "warm_up": False,  # a newcomer takes over the others' position before its first batch
            }  # fmt: skip
            try:
                window.manager = manager = Manager(pg=default_process_group(), **options)
            except JobFinishedError as error:
                window.ended = self._ended
                raise nothing_left(error) from error
            carried = RUNS.carried(window.group)
            if carried:
                manager.load_state_dict(carried)
            self.first_step = carried.get("step", 0)
            self._started(manager)
        return window.manager

    def _place_of_store(self) -> Mapping[str, Any]:
        """`store_addr` and `store_port`, where the Manager's own defaults are not right."""
        return {}

    def _started(self, manager: Manager) -> None:
        """The Manager is there, without a quorum."""
        load, save = self._functions
        manager.register_state_dict_fn(KEY, load, save)

    def wrap(self, module: nn.Module, options: Mapping[str, Any], kind: type[WindowedModel] = WindowedModel) -> Any:
        """A model that this run trains.

        Args:
            module: the model.
            options: of torch's DistributedDataParallel.
            kind: of the wrapper.

        Raises:
            ConfigError: one of the options cannot work here.
            UsageError: training has ended.
        """
        wrapped = kind(self.start_manager(), self.window, module, **options)
        self.window.trains(weakref.ref(wrapped))
        return wrapped

    def _opened(self) -> None:
        self.leadership.opened()
        if self._after_opening is not None:
            self._after_opening()

    # ------------------------------------------------------------ what the leader writes

    def save_file(self, path: Any, write: Callable[[Any], object], *, beside: bool = True) -> None:
        """Write a checkpoint, if this group leads, and put it in its place when its step is stable.

        Args:
            path: its place.
            write: writes it to a path, on the first rank of the group.
            beside: `write` makes one file, which can be moved; else it writes to `path` at once.
        """
        if not beside:
            self.leadership.writing(str(path), lambda: write(path))
            return
        file = PlacedFile(os.path.abspath(os.fspath(path)))
        first = self.window.rank == 0
        self.leadership.writing(file.target, lambda: write(file.beside), lambda: file.place() if first else None)

    # ------------------------------------------------------------ the end

    def superseded(self) -> None:
        """Another run of this process begins."""
        if self.manager is not None and not self.window.ended:
            log.warning("another training run begins in this process: the one before it ends here")
            self._leave("another run begins", why="another run of this process has begun")

    def end(self) -> None:
        """All replicas stop after the same step, then this one leaves. A replica that wanted to go on stops, too."""
        manager, window = self.manager, self.window
        if window.ended:
            return
        if manager is None:
            window.ended = self._ended
            return
        window.close()
        if manager.quorum_id:
            stop_together(manager, lambda: window.agree_on(None))
            if manager.stop_agreed:
                self.publisher.publish()  # before the others, which know the end as well, look for it
        self._leave("finished", why=self._ended, finished=True)

    def leave(self) -> None:
        """The script ends without a call of `end`."""
        if self.manager is not None and not self.window.ended:
            self._leave("the script ends", why=self._ended)

    def _leave(self, reason: str, *, why: str, finished: bool = False) -> None:
        manager, window = self.manager, self.window
        assert manager is not None
        window.ended = why
        window.end_pauses()
        RUNS.over(manager.state_dict())
        manager.leave(reason, finished=finished)
        if window.after_vote is not None:
            window.after_vote()
        manager.shutdown()


def _nothing(_: bool) -> None:
    """The default: nothing depends on who leads."""
