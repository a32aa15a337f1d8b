"""The witness: waits for the death of the training processes that it is connected to, and ends their connections.

How it works. A training process sends, over a Unix socket, the page of a robust mutex that one of its threads holds,
and duplicates of the connections whose end shows its death to others (`link` is that side). One thread per mutex waits
for it. If its holder died, all duplicates that belong to that mutex are shut down: that ends the connection itself, not
only the duplicate, so every peer sees the end of file now instead of when the kernel has freed the process's memory.
Whoever runs the witness may be notified, too (`died`): ftrun is, and starts a replacement at once.

A mutex is released, too, when only its thread ends or when the process execs; `is_ending` sees that these are none, so
that nothing which still runs loses a connection. Duplicates are dropped when the owner sends a new set, when it lets go
of the mutex, and when its connection to the witness ends: they never outlive what they were sent for. What the owner
sent just before it died may be read after its death is known: it is shut down then.

Invariants: only connections that the dead process itself handed over are shut down; a duplicate of one that its owner
shut down is ended already, so none is kept open by this process. Bounds: MAX_WATCHED mutexes, MAX_FDS duplicates each.

Run as a file (`python -I -S process.py <fd>`) with the standard library only, by a training process that no keeper of
ftrun's looks after, or used by that keeper (`launch.keeper`). Threads: `serve` is the only one that reads; one waiting
thread per mutex, which under `_lock` takes the duplicates away and shuts them down.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from types import ModuleType

TYPE_CHECKING = False  # the typing module would be a tenth of this process's memory
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.witness.robust_mutex import RobustMutex

MAX_WATCHED = 1024
"""Mutexes that one witness waits for."""
MAX_FDS = 4096
"""Duplicates that one mutex may bring."""
FDS_PER_MESSAGE = 128
"""Descriptors in one message; the kernel allows 253."""

ENDING_S = 0.05
"""How long the main thread of a process may take to end when another one has been killed with it."""
LOOK_S = 0.001
FINISH_S = 1.0
"""How long a witness whose process is gone may take for what is left to do."""

HEAD = struct.Struct("=BI")
"""What to do, and which mutex (a number of the sender's)."""
WATCH, CONNECTIONS, MORE, RELEASE = range(1, 5)
"""A mutex to wait for, with its page and what /proc shows of its holder (see `Watched`); the connections to end with it
(MORE: further ones of that set); forget it."""
PF_EXITING = 0x4
"""The kernel's flag of a task that is ending, in field 9 of /proc/<pid>/stat."""

STAT_BYTES = 1024
"""Enough for the fields that are read."""
_SHUTDOWN = socket.SHUT_RDWR


class Watched:
    """One mutex, and what ends with its holder.

    `stats`: open files, the holder's thread's `stat` in /proc and then its process's; none where there is no /proc.
    Files, not numbers: a number means another process in another PID namespace, and later on anywhere. `pid` is for
    whoever knows what it means there: the number that the kernel gives for the other end of the connection.
    """

    def __init__(self, mutex: RobustMutex, stats: Sequence[int], pid: int) -> None:
        self.mutex = mutex
        self.pid = pid
        self.dead = self.forgotten = False
        self._stats = list(stats)
        self.fds: list[int] = []

    def __repr__(self) -> str:
        return f"Watched({self.mutex!r}, connections={len(self.fds)})"

    @property
    def is_ending(self) -> bool:
        """Whether the process of the thread that let go of the mutex is ending; False: it goes on, as after an exec.

        Where /proc does not say, it is: the thread held the mutex and did not say that it ends regularly. (Should that
        be an exec: the kernel closes these connections then, too.)
        """
        for fd in self._stats:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it is gone: the next one may say more
                flags = int(os.pread(fd, STAT_BYTES, 0).rpartition(b")")[2].split()[6])
                return bool(flags & PF_EXITING)
        return True

    def comes_to_end(self) -> bool:
        """`is_ending`, or it is within ENDING_S: of a killed process one thread may be gone before the next ends."""
        until = time.monotonic() + ENDING_S
        while not self.is_ending:
            if self.forgotten or time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)
        return True

    def forget(self) -> None:
        """Nothing is to end with its holder any more."""
        self.forgotten = True
        self.drop()

    def close(self) -> None:
        """Nothing will be asked any more: by the thread that waits, which alone asks without the lock."""
        stats, self._stats = self._stats, []
        _close(stats)

    def drop(self) -> None:
        """Close the duplicates; the connections go on if their owner lives."""
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)

    def end(self) -> None:
        """The holder is dead: shut down the connections, whoever else holds them."""
        self.dead = True
        for fd in self.fds:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(_SHUTDOWN)
        self.drop()


class Witness:
    """Everything one witness waits for.

    Args:
        make_mutex: maps a page.
        died: called with the pid of a process that died, on the thread that waited for it; must not block.
    """

    def __init__(self, make_mutex: Callable[[int], RobustMutex], died: Callable[[int], None] = lambda _: None) -> None:
        self._make_mutex = make_mutex
        self._died = died
        self._watched: dict[tuple[int, int], Watched] = {}
        self._orphans: set[Watched] = set()
        """Processes whose connection to the witness has ended, but whose mutex has not shown yet that they died."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Witness(watched={len(self._watched)})"

    def listen(self, door: socket.socket) -> None:
        """Serve every training process that connects, for ever."""
        selector = selectors.DefaultSelector()
        selector.register(door, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is door:
                    with contextlib.suppress(OSError):  # it has gone again, or there are no descriptors left
                        selector.register(door.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket) and not self.serve(key.fileobj):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()

    def serve(self, link: socket.socket) -> bool:
        """Read one message of a training process. False: there will be no more."""
        try:
            data, ancillary, _, _ = link.recvmsg(HEAD.size, socket.CMSG_SPACE(4 * FDS_PER_MESSAGE))
        except OSError:
            data, ancillary = b"", []
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if len(data) != HEAD.size:
            _close(fds)
            self._forget(link.fileno())
            return False
        self._handle(link, data, fds.tolist())
        return True

    def _handle(self, link: socket.socket, data: bytes, fds: Sequence[int]) -> None:
        what, number = HEAD.unpack(data)
        key = link.fileno(), number
        if what == WATCH and fds and len(self._watched) < MAX_WATCHED and key not in self._watched:
            self._watch(key, peer(link), *fds)
            return
        with self._lock:
            watched = self._watched.get(key)
            if watched is not None and what in (CONNECTIONS, MORE) and len(watched.fds) + len(fds) <= MAX_FDS:
                if what == CONNECTIONS:
                    watched.drop()
                watched.fds += fds
                if watched.dead:
                    watched.end()
                return
            if watched is not None and what == RELEASE:
                watched.forget()
                del self._watched[key]
        _close(fds)

    def _watch(self, key: tuple[int, int], pid: int, page: int, *stats: int) -> None:
        try:
            watched = Watched(self._make_mutex(page), stats, pid)
        except (OSError, ValueError):
            _close(stats)
            return  # it cannot be mapped: as if there were no witness
        finally:
            os.close(page)  # the mapping keeps the page
        with self._lock:
            self._watched[key] = watched
        threading.Thread(target=self._wait, args=(key, watched), name="ft-witness-wait", daemon=True).start()

    def _wait(self, key: tuple[int, int], watched: Watched) -> None:
        ending = watched.mutex.wait() and watched.comes_to_end()
        with self._lock:
            died = ending and not watched.forgotten
            if died:
                watched.end()
            listed = self._watched.get(key) is watched
            self._orphans.discard(watched)
            if not died or not listed:  # else there may be more to read; its connection ends, too
                watched.forget()
                if listed:
                    del self._watched[key]
            watched.close()
        if died:
            self._died(watched.pid)

    def _forget(self, link: int) -> None:
        """The training process closed its side. If it is ending, the threads that wait do the rest."""
        with self._lock:
            mine = [(key, watched) for key, watched in self._watched.items() if key[0] == link]
            for key, watched in mine:
                del self._watched[key]
                if watched.dead or not watched.is_ending:
                    watched.forget()
                else:
                    self._orphans.add(watched)

    def finish(self, timeout_s: float) -> None:
        """Wait until what is still watched has been dealt with."""
        deadline = time.monotonic() + timeout_s
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and self._orphans:
                thread.join(max(0.0, deadline - time.monotonic()))


def peer(link: socket.socket) -> int:
    """The pid of the process that connected; of the one that made the pair, where it is one."""
    pid: int = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def load(name: str) -> ModuleType:
    """A module beside this file, for programs that are run as a file and find nothing of this project otherwise."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    module = ModuleType(name)
    with open(path) as source:
        exec(compile(source.read(), path, "exec"), module.__dict__)
    return module


def main(argv: Sequence[str]) -> int:
    """`process.py <fd>`: the witness of the process at the other end of the socket `fd`; ends with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=int(argv[0]))
    witness = Witness(load("robust_mutex").RobustMutex)
    while witness.serve(link):
        pass
    witness.finish(FINISH_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
