"""The ends of worker processes, reported at once and in order: without polling, and before anybody reaps them.

How it works. A pidfd becomes readable when its process ends. One thread waits on all of them and calls back with the
exit code (negative: the signal), read with WNOWAIT so that the agent's own `Popen.poll` still finds it. Where the
kernel has no pidfds, `watch` returns False and the agent's polling has to do.

A process that has died goes on to exist until the kernel has freed its memory, which may take seconds. A witness of
its death (`keeper`) writes its pid into the pipe `deaths`; the kernel has its exit code by then, so the callback comes
at once. It comes once: whoever is told cannot take the process for gone. Where the code cannot be read (or is 0, as it
is before it is set), the callback waits for the pidfd.

Threads: `watch` from any; callbacks run on the thread "ftrun-exits" and must not block.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.launch.processes.keeper import EXIT_CODE, NOTICE

if TYPE_CHECKING:
    from collections.abc import Callable

NOTICES = 1024
"""Read at once."""
STOPS = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
"""They end nothing: in that field they say that the process is stopped."""

log = logging.getLogger("ft_core.launch")
AGAIN_S = 0.1
"""Pause after a mistake of ours, so that one that lasts does not take a core."""


@dataclass(eq=False)
class Child:
    """One process that is watched."""

    pid: int
    pidfd: int
    ended: Callable[[int | None], None]


class Exits:
    """The watcher. `start` it once; `close` ends its thread.

    Args:
        deaths: the pipe with the pids of those that have died, the caller's; None: there is none.
    """

    def __init__(self, deaths: int | None = None) -> None:
        self._deaths = deaths
        self._lock = threading.Lock()
        self._children: set[Child] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._closed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-exits", daemon=True)

    def __repr__(self) -> str:
        return f"Exits(watching {len(self._children)})"

    def start(self) -> None:
        """Start the thread."""
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if self._deaths is not None:
            self._selector.register(self._deaths, selectors.EVENT_READ)
        self._thread.start()

    def watch(self, pid: int, ended: Callable[[int | None], None]) -> bool:
        """Call `ended(exit code)` once when child `pid` is dead, gone or not (None: somebody reaped it first).

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
            child = Child(pid, pidfd, ended)
            self._children.add(child)
            self._selector.register(pidfd, selectors.EVENT_READ, child)
        return True

    def close(self) -> None:
        """End the thread; what has not ended by now is not told any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ending.set()
        if self._thread.ident is not None:
            os.write(self._wake_write, b"c")
            self._thread.join()
        for child in self._children:
            os.close(child.pidfd)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._selector.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:
                log.exception(
                    "ftrun: a mistake of ftrun's own, in watching its workers (please report it): it looks "
                    "again in %g s", AGAIN_S,
                )  # fmt: skip
                self._ending.wait(AGAIN_S)

    def _turn(self) -> None:
        ready = [key for key, _ in self._selector.select()]
        # Deaths first: what is told of there may be ready itself by now.
        for key in sorted(ready, key=lambda key: key.data is not None):
            if key.fd == self._wake_read:
                return
            if key.data is not None:
                self._tell(key.data, exit_code)
            else:
                self._hear(key.fd)

    def _hear(self, deaths: int) -> None:
        data = os.read(deaths, NOTICES * NOTICE.size)
        if not data:  # nobody writes there any more
            self._selector.unregister(deaths)
        for (pid,) in NOTICE.iter_unpack(data):
            with self._lock:
                child = next((child for child in self._children if child.pid == pid), None)
            if child is not None and (code := coming_code(pid, child.pidfd)) is not None:
                self._tell(child, lambda _, code=code: code)  # type: ignore[misc]

    def _tell(self, child: Child, code_of: Callable[[int], int | None]) -> None:
        with self._lock:
            if child not in self._children:
                return
            self._selector.unregister(child.pidfd)
            self._children.remove(child)
        code = code_of(child.pidfd)
        os.close(child.pidfd)
        try:
            child.ended(code)
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


def coming_code(pid: int, pidfd: int) -> int | None:
    """Exit code, never 0, of a child that is ending but is not gone. None if /proc does not tell (us, or yet)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            status = int(stat.read().rpartition(b")")[2].split()[EXIT_CODE])
        signal.pidfd_send_signal(pidfd, 0)  # it has not been reaped: what was read is about this process
        code = os.waitstatus_to_exitcode(status)
    except (OSError, IndexError, ValueError):
        return None
    return code if code and -code not in STOPS else None
