"""`Children`: the child processes of this one, ready before they are needed.

How it works. One helper process per process (`forks.py`) is started when the first group is constructed, and forks a
child whenever it is sent the end of a channel. One child is always forked ahead (the spare), so `take` returns at once
with a process that has imported everything; the next spare is being forked meanwhile. A child serves one group once and
is killed with it: nothing of an earlier group can be left in it.

Invariants: a child is killed through its pidfd, so never another process of the same number. Every child is waited for
by the helper, the helper by this process. If the helper dies, its children do, and the next `take` starts another.
What is remembered of dead children is bounded by MAX_DEATHS.
Threads: `prepare`, `take`, `how_died`, `replace_helper` from any. "ft-baby-helper" starts the helper and lives as long
as this process does: the kernel counts a process's parent as gone when the thread that started it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ft_core.errors import ConfigError, ThisMachineError, UsageError
from ft_core.process_group.baby.channel import Channel
from ft_core.process_group.baby.forks import DIED, FORK
from ft_core.process_group.fork_safety import close_in_child

logger = logging.getLogger(__name__)

MAX_DEATHS = 256
DIED_WAIT_S = 0.5
"""How long the helper's report of how a child died is waited for; it takes a millisecond."""
FORK_TRIES = 3
EXIT_WAIT_S = 5.0
"""How long the helper may take to end its children and itself when this process exits; then it is killed."""
SUPPORTED = sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")


@dataclass
class Child:
    """A child process, or one that is being forked: then its pid comes with its first message."""

    channel: Channel
    pid: int | None = None
    pidfd: int = -1
    _lock: Any = field(default_factory=threading.RLock)  # a finalizer may kill it in the middle of anything
    _killed: bool = False

    def __repr__(self) -> str:
        return f"Child({self.pid or 'being forked'})"

    def is_here(self, pid: int, pidfd: int) -> None:
        """It has started; ends it if it was killed before."""
        with self._lock:
            self.pid, self.pidfd = pid, pidfd
            killed = self._killed
        if killed:
            self.kill()

    def kill(self) -> None:
        """Kill it, whatever it does; from any thread, idempotent. One that has not started ends when it does."""
        with self._lock:
            self._killed = True
            if self.pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.channel.shut_down()

    def close(self) -> None:
        """Give its descriptors back."""
        with self._lock:
            pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        self.channel.close()

    def fds(self) -> list[int]:
        """Return the descriptors, for a forked process to drop."""
        return [fd for fd in (self.channel.fileno(), self.pidfd) if fd >= 0]


class Children:
    """See the file's header."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._wanted = threading.Semaphore(0)
        self._ends: list[tuple[Channel, int]] = []
        self._spare: Child | None = None
        self._deaths: OrderedDict[int, int] = OrderedDict()
        self._died = threading.Condition(self._lock)
        self._exiting = False

    def __repr__(self) -> str:
        return f"Children(helper {'up' if self._helper else 'not started'}, spare {self._spare})"

    def prepare(self) -> None:
        """Have a helper and a spare; returns at once. Raises ConfigError where the system cannot do it."""
        if not SUPPORTED:
            raise ConfigError(
                "a process group in a child process needs Linux with memfd_create and pidfd_open (kernel 5.3): use "
                "ProcessGroupGloo or ProcessGroupNCCL"
            )
        with self._lock:
            if self._spare is None or self._spare.channel.has_ended():
                stale, self._spare = self._spare, None
            else:
                return
        if stale is not None:
            stale.close()
        spare = self._fork()
        with self._lock:
            if self._spare is None:
                self._spare, spare = spare, None  # type: ignore[assignment]
        if spare is not None:
            spare.kill()
            spare.close()

    def take(self) -> Child:
        """Return a child, which is the caller's to kill; never waits for one to be forked."""
        with self._lock:
            child, self._spare = self._spare, None
        if child is not None and child.channel.has_ended():  # killed from outside, or with the helper
            child.close()
            child = None
        if child is None:
            child = self._fork()
        self.prepare()
        return child

    def how_died(self, pid: int) -> str:
        """Return how that child ended, in words; waits a moment for the helper's report."""
        deadline = time.monotonic() + DIED_WAIT_S
        with self._died:
            self._died.wait_for(lambda: pid in self._deaths or self._helper is None, deadline - time.monotonic())
            status = self._deaths.get(pid)
        if status is None:
            return "has ended, and so has the process that had started it"
        if status >= 0:
            return f"ended by itself with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"

    def replace_helper(self) -> None:
        """The helper does not fork: kill it, and with it its children; the next `take` starts another."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """The process is exiting: end the helper and all children."""
        with self._lock:
            self._exiting = True
            helper, process = self._helper, self._process
        if helper is not None:
            helper.shut_down()
        if process is not None:
            deadline = time.monotonic() + EXIT_WAIT_S
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            process.kill()

    def fds(self) -> list[int]:
        """Return the descriptors, for a forked process to drop."""
        helper, spare = self._helper, self._spare
        found = [] if helper is None else [helper.fileno()]
        return [fd for fd in found + ([] if spare is None else spare.fds()) if fd >= 0]

    def _fork(self) -> Child:
        for _ in range(FORK_TRIES):
            helper = self._connected()
            ours, theirs = _pair()
            with theirs:
                try:
                    helper.send((FORK,), [theirs.fileno()])
                    return Child(Channel(ours))
                except OSError:  # it has just died, and its thread does not know yet
                    ours.close()
                    with self._lock:
                        if self._helper is helper:
                            self._helper = None
        raise ThisMachineError("the process that starts children for process groups dies again and again")

    def _connected(self) -> Channel:
        with self._lock:
            if self._exiting:
                raise UsageError("the process is exiting: no process group is formed any more")
            if self._helper is not None:
                return self._helper
            ours, theirs = _pair()
            helper = self._helper = Channel(ours)
            self._ends.append((helper, theirs.detach()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ft-baby-helper", daemon=True)
                self._thread.start()
                atexit.register(self.stop)
        self._wanted.release()
        return helper

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            with self._lock:
                channel, end = self._ends.pop(0)
            try:
                process = self._process = _start(end)
            except OSError as error:
                logger.error("the process that starts children for process groups cannot be started: %s", error)
                process = None
            finally:
                os.close(end)
            while (received := channel.receive()) is not None:
                kind, pid, status = received[0]
                assert kind == DIED
                with self._died:
                    self._deaths[pid] = status
                    while len(self._deaths) > MAX_DEATHS:
                        self._deaths.popitem(last=False)
                    self._died.notify_all()
            if process is not None:
                status = process.wait()
                if not self._exiting:
                    logger.warning("the process that starts children for process groups has ended (%d)", status)
            with self._died:
                if self._helper is channel:
                    self._helper = None
                self._process = None
                self._died.notify_all()
            channel.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return Channel.pair()
    except OSError as error:
        raise ThisMachineError(f"no connection to a child process: {error}") from error


def _start(end: int) -> subprocess.Popen[bytes]:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from ft_core.process_group.baby.forks import main; "
        f"main({end}, {os.getpid()})"
    )
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [multiprocessing.spawn.get_executable() or sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[end],
        env={**os.environ, **one_thread},
    )


children = Children()


def _fds() -> list[int]:
    return children.fds()


def _after_fork_in_child() -> None:
    global children, _of_the_parent
    _of_the_parent = children
    children = Children()


_of_the_parent: Children | None = None

close_in_child(_fds)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
