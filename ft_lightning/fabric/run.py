"""`FabricRun`: one training run of a Fabric script, from the first `fabric.setup` to `finish`.

How it works. It is composed of the kit's parts (`ft_core.loop`): `window` opens quorums and votes, `leadership` says
who writes. Each run of a process meets the other replicas in a room of its own, and counts on from the step at which
the one before ended.

Threads: the training thread.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from ft_core import Manager, default_process_group
from ft_core.errors import JobFinishedError
from ft_core.loop.division import Division
from ft_core.loop.leadership import Leadership
from ft_core.loop.model import WindowedModel
from ft_core.loop.publishing import Publisher
from ft_core.loop.stopping import stop_together
from ft_core.loop.window import StepWindow, nothing_left
from ft_core.settings import DEFAULT_ROOM
from ft_lightning.runs import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from ft_core.loop.replica_group import ReplicaGroup
    from ft_lightning.arguments import Arguments


class FabricRun:
    """A run.

    Args:
        place: of this process.
        arguments: of the strategy.
        load, save: all state that must be equal on all replicas.
    """

    def __init__(
        self, place: ReplicaGroup, arguments: Arguments, load: Callable[[Any], None], save: Callable[[], Any]
    ) -> None:
        self._arguments, self._functions = arguments, (load, save)
        self.window = StepWindow(place, self._start_manager, self._opened, Division(place.total, _cannot))
        self.knows_stop = False
        """The script had the opportunity to see that all have agreed to stop."""
        self.leadership = Leadership(self.window, Publisher(self.window, self.finish), lambda _: None)

    def __repr__(self) -> str:
        return f"FabricRun({self.window!r})"

    def _start_manager(self) -> Manager:
        window = self.window
        if window.manager is None:
            arguments = self._arguments.for_manager()
            load, save = self._functions
            try:
                window.manager = Manager(
                    pg=default_process_group(),
                    load_state_dict=load,
                    state_dict=save,
                    use_async_quorum=False,  # what a replica that is behind reads depends on the others' state
                    rank=window.rank,
                    world_size=window.ranks,
                    **{**arguments, "room_id": RUNS.room(arguments.get("room_id", DEFAULT_ROOM))},
                )
            except JobFinishedError as error:
                raise nothing_left(error) from None
            carried: Mapping[str, int] = RUNS.carried(window.group)
            if carried:
                window.manager.load_state_dict(carried)
        return window.manager

    def _opened(self) -> None:
        self.leadership.opened()

    def wrap(self, module: nn.Module, options: Mapping[str, Any]) -> WindowedModel:
        """A model of this run. Raises ConfigError for what cannot work."""
        wrapped = WindowedModel(self._start_manager(), self.window, module, **options)
        self.window.trains(weakref.ref(wrapped))
        return wrapped

    def save(self, path: Any, write: Callable[[str], None]) -> None:
        """Write a checkpoint, if this group leads, and put it in its place when its step is stable.

        Args:
            path: its place.
            write: writes it to a path, on the first rank of the group.
        """
        target = os.path.abspath(os.fspath(path))
        folder, name = os.path.split(target)
        beside = os.path.join(folder, f".{name}.partial")  # on the same file system, and not among the checkpoints

        def place() -> None:
            if self.window.rank == 0:
                os.replace(beside, target)

        self.leadership.writing(target, lambda: write(beside), place)

    def finish(self) -> None:
        """All replicas stop after the same step, then this one leaves. Idempotent."""
        window, manager = self.window, self.window.manager
        if window.ended:
            return
        if manager is not None:
            window.close()
            if manager.quorum_id:
                stop_together(manager, lambda: window.agree_on(None))
        window.ended = "fabric.strategy.finish() was called"
        window.end_pauses()
        if manager is not None:
            RUNS.over(manager.state_dict())
            manager.leave("finished", finished=True)
            if window.after_vote is not None:
                window.after_vote()
            manager.shutdown()


def _cannot(_: int) -> bool:
    """Fabric divided its data when the loaders were set up: it is not divided anew."""
    return False
