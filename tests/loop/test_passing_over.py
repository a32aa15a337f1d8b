"""The others finish a run while this replica waits for a quorum in it, and are in a later one."""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.errors import JobFinishedError
from ft_core.loop.division import Division
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.runs import PassedOverError
from ft_core.loop.uneven import UnevenEnd
from ft_core.loop.window import StepWindow


class Finished:
    """A Manager whose room is closed while it asks; nothing else of it is called."""

    hooks: Any
    shut_down = 0

    def __init__(self) -> None:
        self.hooks = self

    def trains_on(self, position: int | None) -> None:
        assert position is None

    def start_quorum(self) -> None:
        raise JobFinishedError("finished at step 3")

    def shadow_step(self, *_: Any, **__: Any) -> bool:
        raise JobFinishedError("finished at step 3")

    def shutdown(self, *, wait: bool) -> None:
        assert not wait
        self.shut_down += 1


def window_of(manager: Any) -> StepWindow:
    window = StepWindow(ReplicaGroup(), lambda: manager, lambda: None, Division(1, lambda _: False))
    window.manager = manager
    return window


def test_a_window_and_an_uneven_end_stop() -> None:
    for ask in (StepWindow.before_batch, lambda window, _: UnevenEnd(window, lambda _: None).run_out()):
        manager = Finished()
        window = window_of(manager)
        window.on_finished = lambda error: PassedOverError(str(error))  # it looked, and passes over the run
        ask(window, None)
        assert window.stopped
        assert manager.shut_down == 1


def test_else_the_replica_ends() -> None:
    with pytest.raises(SystemExit) as ended:
        window_of(Finished()).before_batch(None)
    assert ended.value.code == 0
