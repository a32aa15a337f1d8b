"""Ends every worker if ftrun itself is killed: a process that outlives it by a moment, and the handle ftrun holds.

How it works. `kill -9` cannot be caught, and PR_SET_PDEATHSIG follows the forking *thread*, not the process. So ftrun
starts one small process in a session of its own and holds the write end of a pipe to it. Workers introduce
themselves over a Unix socket before they run anything (`stub`); the kernel says who they are, and a pidfd keeps the
keeper from ever signalling a process that took over the number. When the pipe closes, and it closes however ftrun
ended, the process group of every registered worker is killed, the run directory removed, and the keeper ends. Who
connects later finds nobody, and who waits in the socket's queue is sent away when it closes: such a stub ends.

A keeper that was killed is replaced. Whoever had registered with it was ftrun's child then, and is still one if it
lives: the next keeper is told all of them. Who was about to register tries again (`stub`).

Invariants: the keeper signals only what registered with it, or with the one before, and has not ended; it needs no
torch and never blocks on anybody. It is run as a file, with the standard library only. Threads: none in the process;
`Keeper` is the main thread's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

END_S = 5.0
"""How long a keeper that does not end by itself is waited for."""


class Keeper:
    """ftrun's handle on the keeper process. The constructor starts it.

    Args:
        folder: the run directory, ftrun's own; the keeper removes it at the end.

    Raises:
        OSError: no process, or no socket in `folder`.
    """

    def __init__(self, folder: str) -> None:
        self.address = os.path.join(folder, "keeper")
        self._folder = folder
        self._writing = -1
        self._start([])

    def renew(self) -> None:
        """Start another keeper after this one has ended; it knows every worker that this one knew.

        Raises:
            OSError: no process, or no socket in `folder`.
        """
        os.close(self._writing)
        self._writing = -1
        os.makedirs(self._folder, mode=0o700, exist_ok=True)  # somebody may have cleaned up there
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.address)
        # Only now: what is forked from here on registers with the next one.
        self._start(_children_with_sessions())

    def _start(self, pids: Sequence[int]) -> None:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(self.address)
            door.listen(256)
            self._spawn(door, pids)

    def _spawn(self, door: socket.socket, pids: Sequence[int]) -> None:
        reading, self._writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(door.fileno()), str(reading), *map(str, pids)],
                # Not in the command line: `pkill -9 -f ftrun` must not find the keeper as well.
                env={**os.environ, "FTRUN_FOLDER": self._folder},
                pass_fds=(door.fileno(), reading), start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)

    def __repr__(self) -> str:
        return f"Keeper(pid={self.process.pid}, {'running' if self.alive() else 'ended'})"

    def alive(self) -> bool:
        """Whether workers are still protected."""
        return self.process.poll() is None

    def environment(self) -> dict[str, str]:
        """What a worker's stub needs."""
        return {"FTRUN_KEEPER": self.address, "FTRUN_PID": str(os.getpid())}

    def close(self) -> None:
        """End the keeper, and with it every worker that is still there. Idempotent, bounded in time."""
        if self._writing < 0:
            return
        os.close(self._writing)
        self._writing = -1
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # if it could not


def _children_with_sessions() -> list[int]:
    """Living children of this process that lead a session, as every worker and standby does.

    Not what the agents believe to run: a process registers before they have heard of it.
    """
    own, found = os.getpid(), []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # not a process, or it has ended
            pid = int(entry)
            with open(f"/proc/{pid}/stat") as stat:
                state, parent, _, session = stat.read().rpartition(")")[2].split()[:4]
            if int(parent) == own and int(session) == pid and state != "Z":
                found.append(pid)
    return found


# ---------------------------------------------------------------- the process


def keep(door: socket.socket, pipe: int, folder: str, pids: Sequence[int]) -> None:
    """Register workers until `pipe` closes, then kill them. `pids`: those of a keeper that has ended."""
    workers: dict[int, int] = {}  # pidfd -> pid
    selector = selectors.DefaultSelector()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _register(pid, selector, workers)
    selector.register(door, selectors.EVENT_READ)
    selector.register(pipe, selectors.EVENT_READ)
    running = True
    while running:
        for key, _ in selector.select():
            if key.fd == pipe:
                running = False
            elif key.fd == door.fileno():
                _receive(door, selector, workers)
            else:
                selector.unregister(key.fd)
                del workers[key.fd]
                os.close(key.fd)
    for pidfd, pid in workers.items():
        _kill(pidfd, pid)
    door.close()
    shutil.rmtree(folder, ignore_errors=True)


def _receive(door: socket.socket, selector: selectors.BaseSelector, workers: dict[int, int]) -> None:
    with contextlib.suppress(OSError):  # it has gone again, or there are no descriptors left: it gets no byte
        connection, _ = door.accept()
        with connection:
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            _register(pid, selector, workers)
            connection.send(b"k")


def _register(pid: int, selector: selectors.BaseSelector, workers: dict[int, int]) -> None:
    pidfd = os.pidfd_open(pid)
    selector.register(pidfd, selectors.EVENT_READ)
    workers[pidfd] = pid


def _kill(pidfd: int, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, 0)  # still the process that registered
        os.killpg(pid, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """`keeper.py <listening fd> <pipe fd> [<pid> ...]`, with the run directory in FTRUN_FOLDER."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one pidfd per worker
    keep(socket.socket(fileno=int(argv[0])), int(argv[1]), os.environ["FTRUN_FOLDER"], [int(pid) for pid in argv[2:]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
