"""The one thread that destroys Gloo groups, once nothing runs on them any more.

Destroying a group that has work in flight, or destroying it from whatever thread or finalizer happens to drop the
last reference, can block for the collective's timeout or end the process. So owners only hand groups in, at any time
and even from a finalizer, and this thread polls each until it says that it is gone.

Invariants: `retire` never blocks and takes no lock (SimpleQueue.put is re-entrant). A group is in the list at most
once: its owner hands it in once. The list is bounded by what fails to end; beyond WARN_ABOVE that is logged.

Threads: `retire` from any; the rest is the daemon thread "ft-gloo-reaper", which polls while something is left, sleeps
otherwise, and lives until the interpreter exits. It must not be inside a destructor then: taking the GIL back in an
ending interpreter ends the thread from within C++, which aborts the process. So `stop` waits for it.
"""

from __future__ import annotations

import atexit
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
EXIT_S = 2.0
"""How long interpreter exit waits for groups to be gone; what is left then is left to the kernel."""


class Retired(Protocol):
    """What the reaper takes."""

    def try_destroy(self) -> bool:
        """Take one step towards being gone, without blocking; True once it is."""


class Reaper:
    """See the file's header."""

    def __init__(self) -> None:
        self._incoming: queue.SimpleQueue[Retired] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._held = 0
        self._empty = threading.Event()
        self._destroying = threading.Lock()
        self._stopped = False

    def __repr__(self) -> str:
        return f"Reaper({self._held} groups left)"

    def retire(self, group: Retired) -> None:
        """Take over `group`'s end."""
        if os.getpid() != self._pid:
            return  # a forked child keeps what it inherited until it ends
        self._empty.clear()
        self._incoming.put(group)
        if self._thread is None:
            # Two threads may both come here: two reapers do no harm.
            self._thread = threading.Thread(target=self._run, name="ft-gloo-reaper", daemon=True)
            self._thread.start()

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until everything handed in is gone; whether that came true in time."""
        return self._thread is None or self._empty.wait(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Destroy what ends within `timeout_s` and nothing after it: the interpreter is about to exit."""
        if os.getpid() != self._pid or threading.current_thread() is self._thread:
            return
        deadline = time.monotonic() + timeout_s
        self.wait_empty(timeout_s)
        self._stopped = True
        if self._destroying.acquire(timeout=max(0.1, deadline - time.monotonic())):
            self._destroying.release()

    def _run(self) -> None:
        held: list[Retired] = []
        poll_s = POLL_FIRST_S
        while True:
            try:
                held.append(self._incoming.get(timeout=poll_s if held else None))
                poll_s = POLL_FIRST_S
            except queue.Empty:
                poll_s = min(POLL_LAST_S, poll_s * 1.5)
            with self._destroying:
                if not self._stopped:
                    held = [group for group in held if not self._destroyed(group)]
            if self._stopped:
                threading.Event().wait()  # for ever: returning would drop, and so destroy, what is left
            if len(held) > WARN_ABOVE and len(held) > self._held:
                logger.warning("%d aborted Gloo groups do not end; their sockets and threads stay", len(held))
            self._held = len(held)
            if not held and self._incoming.empty():
                self._empty.set()

    @staticmethod
    def _destroyed(group: Retired) -> bool:
        try:
            return group.try_destroy()
        except Exception:
            logger.exception("a Gloo group could not be destroyed; keeping it")
            time.sleep(POLL_LAST_S)
            return False


reaper = Reaper()


def _after_fork_in_child() -> None:
    global reaper
    reaper = Reaper()


def _at_exit() -> None:
    reaper.stop(EXIT_S)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
