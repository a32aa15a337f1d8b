"""Tells at once, and in order, which worker process ended and how: without polling, and before anybody reaps it.

How it works. A pidfd becomes readable when its process ends. One thread waits on all of them and calls back with the
exit code (negative: the signal), read with WNOWAIT so that the agent's own `Popen.poll` still finds it. Where the
kernel has no pidfds, `watch` returns False and the agent's polling has to do.

Threads: `watch` from any; callbacks run on the thread "ftrun-exits" and must not block.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("ft_core.launch")


class Exits:
    """The watcher. `start` it once; `close` ends its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[int | None], None]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ftrun-exits", daemon=True)

    def __repr__(self) -> str:
        return f"Exits(watching {len(self._callbacks)})"

    def start(self) -> None:
        """Start the thread."""
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    def watch(self, pid: int, ended: Callable[[int | None], None]) -> bool:
        """Call `ended(exit code)` when child `pid` ends (None: somebody reaped it first).

        False: nobody will call; there are no pidfds here, no such process any more, or the watcher is closed.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return False
        with self._lock:
            if self._closed:
                os.close(pidfd)
                return False
            self._callbacks[pidfd] = ended
            self._selector.register(pidfd, selectors.EVENT_READ)
        return True

    def close(self) -> None:
        """End the thread; what has not ended by now is not told any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread.ident is not None:
            os.write(self._wake_write, b"c")
            self._thread.join()
        for pidfd in self._callbacks:
            os.close(pidfd)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake_read:
                    return
                with self._lock:
                    self._selector.unregister(key.fd)
                    ended = self._callbacks.pop(key.fd)
                code = exit_code(key.fd)
                os.close(key.fd)
                try:
                    ended(code)
                except Exception:
                    log.exception("ftrun: the end of a worker could not be told")  # this thread serves all groups


def exit_code(pidfd: int) -> int | None:
    """Exit code of an ended child that nobody has reaped yet; negative: the signal. None if somebody was faster."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
