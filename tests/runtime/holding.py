"""Gloo whose collectives over tensors of one size are under way until a gate opens, as if a peer were slow."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from ft_core import ProcessGroupGloo
from tests.runtime.harness import LIMIT_S

if TYPE_CHECKING:
    import threading


class HeldWork(Work):
    """A collective that ends when the gate opens, well or with an error."""

    def __init__(self, inner: Work, gate: threading.Event, error: Exception | None) -> None:
        super().__init__()
        self.inner, self.gate, self.error = inner, gate, error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert self.gate.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return self.inner.wait()

    def is_completed(self) -> bool:
        return self.gate.is_set() and self.inner.is_completed()


class HoldingGroup(ProcessGroupGloo):
    """Holds back the collectives over `size` elements on both lanes; `error` is how they end."""

    def __init__(self, size: int, gate: threading.Event, error: Exception | None = None) -> None:
        super().__init__(hostname="127.0.0.1")
        self.size_held, self.gate, self.error = size, gate, error

    def sibling(self) -> HoldingGroup:
        return HoldingGroup(self.size_held, self.gate, self.error)

    def _launch(self, name: str, *arguments: Any) -> Work:
        work = super()._launch(name, *arguments)
        held = name == "allreduce" and arguments[0][0].numel() == self.size_held
        return HeldWork(work, self.gate, self.error) if held else work
