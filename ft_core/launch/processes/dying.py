"""The processes of a group's last run that are dead, but whose memory the kernel has not freed yet.

How it works. The group's next run does not wait for them; `names` tells its workers for whom they have to, before they
allocate anything (`predecessors`). Here they are only reaped: when the agent looks after its group anyhow, and
at its end, when they are waited for.

Invariants: they are all of one run; those of an earlier one are gone before. Nothing is left after `close`, which ends
within about REAP_S. Used on the group's thread only.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from ft_core.launch.processes import predecessors

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

log = logging.getLogger("ft_core.launch")

REAP_S = 10
"""How long a process that was killed may take to be gone; what is not gone then hangs in the kernel."""


class Dying:
    """At most one run's processes."""

    def __init__(self) -> None:
        self._context: SubprocessContext | None = None

    def __repr__(self) -> str:
        return f"Dying({len(self._processes())} processes)"

    def take(self, context: SubprocessContext) -> None:
        """These were killed. Waits for those of the run before."""
        self.close()
        self._context = context

    def names(self) -> str:
        """The processes that are still there, as FT_PREDECESSORS names them."""
        found = []
        for process in self._processes():
            with contextlib.suppress(OSError, IndexError):  # no /proc
                if process.poll() is None:
                    found.append(f"{process.pid}:{predecessors.start_time(process.pid)}")
        return ",".join(found)

    def reap(self) -> None:
        """Reap those that are gone."""
        gone = [process.poll() is not None for process in self._processes()]
        if all(gone):
            self.close()

    def close(self) -> None:
        """Wait until all are gone. Idempotent."""
        until = time.monotonic() + REAP_S
        for process in self._processes():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        context, self._context = self._context, None
        if context is None:
            return
        gone = {rank: one for rank, one in context.subprocess_handlers.items() if one.proc.poll() is not None}
        if left := [one.proc.pid for rank, one in context.subprocess_handlers.items() if rank not in gone]:
            log.error("processes %s hang in the kernel %d s after SIGKILL, and are left behind", left, REAP_S)
        context.subprocess_handlers = gone  # torch before 2.13 waits for the others without a limit
        context.close(signal.SIGKILL, 0)

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [handler.proc for handler in self._context.subprocess_handlers.values()] if self._context else []
