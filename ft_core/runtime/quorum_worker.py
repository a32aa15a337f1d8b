"""The thread that does what may block when a quorum forms, and keeps the one timer of a rank's machine.

How it works. Work is done one piece at a time, in order. While there is none the thread waits until the machine's timer
is due, and looks every LOOK_S whether somebody wants something that does not come as an event.

Threads: `_run` is the worker; everything else is called by any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("ft_core")
LOOK_S = 1.0
"""How often `look` is called while a quorum is waited for."""
MAX_WORK = 64
"""Pieces of work that wait: a quorum brings three, and is over before the next one is entered."""


class QuorumWorker:
    """One thread per rank.

    Args:
        name: of the thread.
        changed: the condition of the rank's lock, notified after each event.
        next_at: when the timer is due (monotonic s), called under the lock.
        tick: the timer is due; called without the lock, as are the others.
        look: a quorum is waited for.
    """

    def __init__(
        self, name: str, changed: threading.Condition, next_at: Callable[[], float], tick: Callable[[], None],
        look: Callable[[], None],
    ) -> None:  # fmt: skip
        self._changed = changed
        self._next_at, self._tick, self._look = next_at, tick, look
        self._work: deque[Callable[[], None]] = deque()
        self._look_at = 0.0
        """When to look next (monotonic s)."""
        self._stopped = False
        self.writes = False
        """What is done now may write to the script's own tensors. Set by it, under the lock, and over when it ends."""
        self._thread = threading.Thread(target=self._run, name=f"ft-quorum-{name}", daemon=True)

    def __repr__(self) -> str:
        return f"QuorumWorker({'alive' if self._thread.is_alive() else 'ended'}, {len(self._work)} to do)"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, work: Callable[[], None]) -> None:
        """Do it after what was added before. After `stop` nothing is done any more."""
        with self._changed:
            if len(self._work) >= MAX_WORK:
                raise RuntimeError(f"{MAX_WORK} pieces of work wait for the quorum worker")  # ours: cannot happen
            self._work.append(work)
            self._changed.notify_all()

    def outlast_writes(self, unless: Callable[[], bool]) -> None:
        """Block until the script's tensors are the script's again, as bounded as what is done; or until `unless()`."""
        with self._changed:
            self._changed.wait_for(lambda: not self.writes or unless())

    def stop(self, timeout_s: float) -> None:
        """End the thread; nothing that it does may last."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            work = self._next()
            if work is None:
                return
            try:
                work()
            except Exception:
                log.exception("unexpected failure while a quorum forms")

    def _next(self) -> Callable[[], None] | None:
        """What to do next; None: end."""
        with self._changed:
            if self.writes:
                self.writes = False
                self._changed.notify_all()
            while not self._stopped:
                if self._work:
                    return self._work.popleft()
                now, due = time.monotonic(), self._next_at()
                if now >= due:
                    return self._tick
                waits = due < float("inf")
                if waits and now >= self._look_at:
                    self._look_at = now + LOOK_S
                    return self._look
                self._changed.wait(min(due, self._look_at) - now if waits else None)
        return None
