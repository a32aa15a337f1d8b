"""One start of a group's workers, and how it failed. Values; the agent's lock guards `Run`."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque

    from ft_core.launch.output.streams import Stream


@dataclass(frozen=True)
class Failure:
    """How a run of a group failed: who was first."""

    name: str
    local_rank: int
    pid: int
    code: int
    at: float
    """Wall clock, seconds."""
    lived_s: float
    error: str
    """The last exception line of that worker, or ''."""
    tail: tuple[str, ...]
    excuse: str = ""
    """Why ftrun ended it itself; '': it ended by itself."""

    def report(self) -> str:
        """How a group ended for good: who was first, with its last lines."""
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        head = f"{self.name} failed for good at {when}, {self.lived_s:.1f} s after its start: {self}"
        return "\n".join([head, "its last lines:", *(f"    {line}" for line in self.tail[-25:])])

    def __str__(self) -> str:
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"rank {self.local_rank} (pid {self.pid}) was ended by {signal.Signals(-self.code).name}"
        text = f"rank {self.local_rank} (pid {self.pid}) exited with code {self.code}"
        return f"{text}: {self.error}" if self.error else text


@dataclass
class Run:
    """One start of the group's workers."""

    pids: dict[int, int] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    started_at: float = 0.0
    first: tuple[int, int, int, float] | None = None
    """(local rank, pid, code, wall clock) of the first failure."""
    tails: dict[int, deque[str]] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
