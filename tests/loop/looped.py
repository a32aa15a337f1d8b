"""`Looped`: a replica of tests/runtime/harness.py whose loop is the kit's: window, leader, publisher."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Any

from ft_core.loop.division import Division
from ft_core.loop.leadership import Leadership
from ft_core.loop.model import WindowedModel
from ft_core.loop.position import Position
from ft_core.loop.publishing import Publisher
from ft_core.loop.replica_group import ReplicaGroup
from ft_core.loop.window import StepWindow
from tests.runtime.harness import Replica

if TYPE_CHECKING:
    from collections.abc import Callable


class Looped(Replica):
    """Writes `NAME of STEP` into `disk` after each commit, as a script would write a checkpoint.

    Args:
        index: number of its group.
        disk: all replicas' files: what was written beside its place, and what is in its place (`place ...`).
        write: called before each write with this replica and the step; may raise.
        saves: it writes after each commit.
    """

    def __init__(
        self, index: int, disk: list[str], write: Callable[[Looped, int], None] | None = None, *, saves: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(index, use_async_quorum=False, warm_up=False, **options)
        self.disk, self._write, self._saves = disk, write, saves
        self.led: list[bool] = []
        self.failed: list[str] = []

    def wrap(self) -> None:
        place = ReplicaGroup(self.index, 3, name=self.name)
        window = self.window = StepWindow(place, lambda: self.manager, self.opened, Division(3, lambda _: False))
        window.manager, window.opened_by_hand = self.manager, True
        publisher = Publisher(window, lambda: None)
        self.leadership = Leadership(window, publisher, self.led.append, self.failed.append, False)
        self.ddp = WindowedModel(self.manager, window, self.model)
        window.trains(weakref.ref(self.ddp))

    def train(self) -> None:
        try:
            super().train()
        finally:
            atexit.unregister(self.leadership.publisher._at_exit)

    def opened(self) -> None:
        self.leadership.opened()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self, "leadership"):
            self.leadership.forget()
        super().load_state_dict(state)

    def iteration(self) -> None:
        self.step = self.manager.current_step()
        self.at("boundary")
        position = Position(0, self.step)
        self.window.before_batch(position)
        self.at("started")
        self.inner.zero_grad()
        loss = self.loss()
        self.at("forward")
        loss.backward()
        self.at("backward")
        committed = self.window.vote()
        if committed:
            self.inner.step()
        self.record(committed, participated=True)
        if committed and self._saves:
            self.save(self.manager.current_step())
        self.at("stepped")

    def save(self, step: int) -> None:
        def write() -> None:
            if self._write is not None:
                self._write(self, step)
            self.disk.append(f"{self.name} {step}")

        def place() -> None:
            beside = any(line.endswith(f" {step}") and not line.startswith("place") for line in self.disk)
            if beside and f"place {step}" not in self.disk:
                self.disk.append(f"place {step}")

        self.leadership.writing(f"step {step}", write, place)
