"""`Reaper`: a thread that destroys groups, once nothing runs on them any more: one for Gloo's, one for devices'.

Destroying a group that has work in flight, or destroying it from whatever thread or finalizer happens to drop the last
reference, can block for the collective's timeout or end the process. So owners only hand groups in, at any time and
even from a finalizer, and this thread polls each until it is gone.

Invariants: `retire` never blocks, takes no lock and starts no thread (SimpleQueue.put is re-entrant), because a
finalizer may call it in the middle of anything, also while the interpreter ends. A group is handed in at most once,
by its owner. The list is bounded by what fails to end; beyond WARN_ABOVE that is logged.

Threads: `start`, `retire` and `wait_empty` from any; the rest is the daemon thread "ft-<kind>-reaper", which polls
while something is left, sleeps otherwise, and lives as long as the process. It must not be inside a destructor when the
interpreter ends: taking the GIL back then ends the thread from within C++, which aborts the process. `stop` sees to it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import Protocol

logger = logging.getLogger(__name__)

POLL_FIRST_S = 0.002
POLL_LAST_S = 0.05
WARN_ABOVE = 64


class Retired(Protocol):
    """What the reaper takes."""

    def try_destroy(self) -> bool:
        """Take one step towards being gone, without blocking; True once it is."""


class Reaper:
    """The destroyer of groups that are over; the file's header has the whole."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._incoming: queue.SimpleQueue[Retired | threading.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._held: list[Retired] = []
        self._warned = False
        self._destroying = threading.Lock()

    def __repr__(self) -> str:
        return f"Reaper({len(self._held)} groups left)"

    def start(self) -> None:
        """Start its thread, unless it runs; called before there is anything to hand in."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"ft-{self._kind}-reaper", daemon=True)
                self._thread.start()

    def retire(self, group: Retired) -> None:
        """Take over `group`'s end."""
        self._incoming.put(group)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until everything handed in is gone; whether that came true in time."""
        self.start()
        empty = threading.Event()
        self._incoming.put(empty)
        return empty.wait(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """The interpreter is about to end: destroy what ends within `timeout_s`, and nothing after that."""
        if self._thread is None or threading.current_thread() is self._thread:
            return
        deadline = time.monotonic() + timeout_s
        self.wait_empty(timeout_s)
        self._destroying.acquire(timeout=max(0.1, deadline - time.monotonic()))  # and never released

    def _run(self) -> None:
        waiting: list[threading.Event] = []
        poll_s = POLL_FIRST_S
        while True:
            try:
                new = self._incoming.get(timeout=poll_s if self._held else None)
                poll_s = POLL_FIRST_S
                if isinstance(new, threading.Event):
                    waiting.append(new)
                else:
                    self._held.append(new)
                del new
            except queue.Empty:
                poll_s = min(POLL_LAST_S, poll_s * 1.5)
            with self._destroying:
                self._held = [group for group in self._held if not self._destroyed(group)]
            if len(self._held) > WARN_ABOVE and not self._warned:
                self._warned = True
                logger.warning(
                    "%d aborted %s groups do not end; their sockets and threads stay", len(self._held), self._kind
                )
            if not self._held:
                for empty in waiting:
                    empty.set()
                waiting.clear()

    def _destroyed(self, group: Retired) -> bool:
        try:
            return group.try_destroy()
        except Exception:
            logger.exception("a %s group could not be destroyed; keeping it", self._kind)
            time.sleep(POLL_LAST_S)
            return False


gloo = Reaper("gloo")
device = Reaper("device")


def _after_fork_in_child() -> None:
    # What the parent's reapers held must not be destroyed here: its threads are not in this process.
    global gloo, device
    _of_the_parent.extend((gloo, device))
    gloo, device = Reaper("gloo"), Reaper("device")


_of_the_parent: list[Reaper] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
