"""Ends every worker if ftrun itself is killed: a process that outlives it by a moment, and the handle ftrun holds.

How it works. `kill -9` cannot be caught, and PR_SET_PDEATHSIG ends a worker, but nothing that it has started. So ftrun
starts one small process in a session of its own and holds the write end of a pipe to it. Workers introduce
themselves over a Unix socket before they run anything (`stub`); the kernel names them, and a pidfd keeps the
keeper from ever signalling a process that took over the number. When the pipe closes, and it closes however ftrun
ended, the process group of every registered worker is killed, the run directory removed, and the keeper ends. The
kernel may have killed the workers themselves a moment before (`stub`): of those that ended like that within RECENT_S
the rest of the session is killed, too. Who connects later finds nobody, and who waits in the socket's queue is sent
away when it closes: such a stub ends.

It is the workers' witness, too (`ft_core.witness`, FT_WITNESS): on a thread of its own it waits for the death of those
that train, and ends their connections at once. Then it writes their pids into a pipe to ftrun (`Keeper.deaths`), which
outlives every keeper: ftrun need not wait until the kernel has freed their memory, either (`exits`).

A keeper that was killed is replaced. Whoever had registered with it was ftrun's child then, and is still one if it
lives: the next keeper is given all of them. Who was about to register tries again (`stub`).

Invariants: the keeper signals only what registered with it, or with the one before, and has not ended; it needs no
torch and never blocks on anybody. It is run as a file, with the standard library only. Threads: in the process the main
one keeps, "witness" and those it starts share nothing with it; `Keeper` is the main thread's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

WITNESS = os.path.join(os.path.abspath(__file__).rpartition(os.path.join("", "launch", ""))[0], "witness", "process.py")
"""Run as a file, this one finds nothing of the project by name."""
END_S = 5.0
"""How long a keeper that does not end by itself is waited for."""
RECENT_S = 0.5
"""A worker that ended so shortly before ftrun did has ended because of it."""
EXIT_CODE = 49
"""Where field 52 is among those that follow the name in /proc/<pid>/stat: the status that waitpid will return."""
NOTICE = struct.Struct("=i")
"""A pid in the pipe of deaths. So short a write is never torn."""


class Keeper:
    """ftrun's handle on the keeper process. The constructor starts it.

    Args:
        folder: the run directory, ftrun's own; the keeper removes it at the end.

    Raises:
        OSError: no process, or no socket in `folder`.
    """

    def __init__(self, folder: str) -> None:
        self.address = os.path.join(folder, "keeper")
        self.witness_address = os.path.join(folder, "witness")
        self._folder = folder
        self._writing = -1
        self.deaths, self._telling = os.pipe()
        """Read NOTICEs here: pids of workers that have died, though the kernel may still be at their memory."""
        os.set_blocking(self._telling, False)  # full, it loses notices, which are only early
        try:
            self._start([])
        except BaseException:
            self._close_deaths()
            raise

    def renew(self) -> None:
        """Start another keeper after this one has ended; it knows every worker that this one knew.

        Raises:
            OSError: no process, or no socket in `folder`.
        """
        os.close(self._writing)
        self._writing = -1
        os.makedirs(self._folder, mode=0o700, exist_ok=True)  # somebody may have cleaned up there
        for address in (self.address, self.witness_address):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
        # Only now: what is forked from here on registers with the next one.
        self._start(_children_with_sessions())

    def _start(self, pids: Sequence[int]) -> None:
        with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as witness:
            for one, address in ((door, self.address), (witness, self.witness_address)):
                one.bind(address)
                one.listen(256)
            self._spawn([door.fileno(), witness.fileno()], pids)

    def _spawn(self, doors: Sequence[int], pids: Sequence[int]) -> None:
        reading, self._writing = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *map(str, (*doors, reading, self._telling, *pids))],
                # Not in the command line: `pkill -9 -f ftrun` must not find the keeper as well.
                env={**os.environ, "FTRUN_FOLDER": self._folder},
                pass_fds=(*doors, reading, self._telling), start_new_session=True, stdin=subprocess.DEVNULL,
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
        """What a worker's stub needs, and its witness's address."""
        return {"FTRUN_KEEPER": self.address, "FTRUN_PID": str(os.getpid()), "FT_WITNESS": self.witness_address}

    def close(self) -> None:
        """End the keeper, and with it every worker that is still there. Idempotent, bounded in time."""
        self._close_deaths()
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

    def _close_deaths(self) -> None:
        if self.deaths >= 0:
            os.close(self.deaths)
            os.close(self._telling)
            self.deaths = self._telling = -1


def _children_with_sessions() -> list[int]:
    """Living children of this process that lead a session, as every worker and standby does.

    Not what the agents believe to run: a process registers before they have heard of it.
    """
    own = os.getpid()
    return [pid for pid, parent, session in _living() if parent == own and session == pid]


def _living() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, session) of every process that has not ended."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # not a process, or it has ended
            pid = int(entry)
            with open(f"/proc/{pid}/stat") as stat:
                state, parent, _, session = stat.read().rpartition(")")[2].split()[:4]
            if state != "Z":
                yield pid, int(parent), int(session)


# ---------------------------------------------------------------- the process


def keep(door: socket.socket, pipe: int, folder: str, pids: Sequence[int]) -> None:
    """Register workers until `pipe` closes, then kill them. `pids`: those of a keeper that has ended."""
    workers: dict[int, int] = {}  # pidfd -> pid
    recent: deque[tuple[float, int]] = deque()  # (when it ended, pid)
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
                if _killed(pid := workers.pop(key.fd)):
                    recent.append((time.monotonic(), pid))
                os.close(key.fd)
        while recent and recent[0][0] < time.monotonic() - RECENT_S:
            recent.popleft()
    for pidfd, pid in workers.items():
        _kill(pidfd, pid)
    _kill_sessions({*workers.values(), *(pid for _, pid in recent)})
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


def _killed(pid: int) -> bool:
    """Whether it was, as far as can be known: it may have been reaped already."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[EXIT_CODE]) == signal.SIGKILL
    except (OSError, IndexError, ValueError):
        return True


def _kill_sessions(leaders: Collection[int]) -> None:
    """Kill what is left of the sessions of workers that may have ended. No other process can have such a session."""
    for pid, _, session in _living() if leaders else ():
        if session in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def bear_witness(door: socket.socket, deaths: int) -> None:
    """Start the thread that serves the workers' death notices, and reports them to ftrun in the pipe `deaths`."""
    spec = importlib.util.spec_from_file_location("process", WITNESS)
    assert spec is not None
    assert spec.loader is not None
    process = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(process)

    def tell(pid: int) -> None:
        with contextlib.suppress(OSError):  # it is full, or ftrun is gone
            os.write(deaths, NOTICE.pack(pid))

    witness = process.Witness(process.load("robust_mutex").RobustMutex, tell)
    threading.Thread(target=witness.listen, args=(door,), name="witness", daemon=True).start()


def main(argv: list[str]) -> int:
    """`keeper.py <listening fd> <witness's fd> <pipe fd> <deaths' fd> [<pid> ...]`, run directory in FTRUN_FOLDER."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one pidfd per worker
    door, witness = (socket.socket(fileno=int(fd)) for fd in argv[:2])
    bear_witness(witness, int(argv[3]))
    keep(door, int(argv[2]), os.environ["FTRUN_FOLDER"], [int(pid) for pid in argv[4:]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
