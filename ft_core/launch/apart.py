"""Groups that train each by itself, because their script never goes to the lighthouse: reported once per job.

A forgotten import is the usual reason. Such a script runs well, in as many copies as there are groups, and all of them
write to the same files. What tells is that the lighthouse has never seen a group of the job, though it answers.

Threads: `ended` on the groups' threads, `on_time` on the main thread.
"""

from __future__ import annotations

import threading
from pathlib import PurePath
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ft_core.launch.group import Group
    from ft_core.launch.lighthouse_watch import Watch

APART_S = 120.0
"""So long a script may take until it has made its Manager, before this is said while it runs."""
DOCTOR = "ft-doctor"
"""The program that groups run before a job: it looks around, and trains nothing."""
REMEDY = (
    "it trains by itself, as the other groups do, and all write to the same places. The script has to make a Manager "
    'of ft_core, or to use Trainer(strategy="fault_tolerant") of Lightning, or FaultTolerantAccelerator or '
    "FaultTolerantTrainer of ft_accelerate in place of Accelerator or Trainer: is the import still the old one?"
)


class Apart:
    """The watch of one run of ftrun for groups that train apart.

    Args:
        watch: knows who has been seen.
        say: shows the user a line about a group.
        total: groups of the job; 0: not known.
        program: what the groups run.
    """

    def __init__(
        self, watch: Watch, say: Callable[[str, str], None], total: Callable[[], int], program: str = ""
    ) -> None:
        self._watch, self._say, self._total = watch, say, total
        self._trains = PurePath(program).name != DOCTOR
        self._lock = threading.Lock()
        self._said = False

    def __repr__(self) -> str:
        return f"Apart({'said' if self._said else 'nothing to say'})"

    def ended(self, name: str, result: RunResult | None) -> None:
        """All workers of a group have ended."""
        if result is None or result.state is not WorkerState.SUCCEEDED or self._needless:
            return
        if self._watch.nobody_came(name):
            self._tell(name, f"has ended and never reached the lighthouse: {REMEDY}")

    def on_time(self, groups: Iterable[Group], now: float) -> None:
        """Look at the groups that run."""
        if self._needless:
            return
        for group in groups:
            late = bool(group.started_at) and not group.ended and now >= group.started_at + APART_S
            if late and self._watch.nobody_came_by(group.started_at + APART_S):
                took = f"{now - group.started_at:.0f} s after its start"
                self._tell(group.name, f"has not reached the lighthouse {took}: until then {REMEDY}")

    @property
    def _needless(self) -> bool:
        return self._said or not self._trains or self._total() == 1

    def _tell(self, name: str, text: str) -> None:
        with self._lock:
            said, self._said = self._said, True
        if not said:
            self._say(name, text)
