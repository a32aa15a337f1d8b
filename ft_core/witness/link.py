"""A training process's side of its witness: whose death is watched, and which connections end with it.

How it works. `DeathNotice` belongs to one Manager. Its `hold`, called by the thread that trains, takes a robust mutex
and has the witness wait for it; `update` sends duplicates of the connections that the Manager has now. All Managers of
a process share one `Link`: a Unix socket to ftrun's keeper (FT_WITNESS names its socket) or to a process of their own
(`process`). Its thread starts the witness, sends what there is, and then only waits for the end of the socket: a
witness that ended is replaced RENEWALS times; after that deaths are known as late as without one.

Whatever fails here costs the early notice and nothing else: it is logged once, and training neither stops nor waits.

Invariants: a page stays mapped while its mutex is locked, because kernel and libc keep pointers into it; only the
thread that locked a mutex unlocks it, at the latest when that thread ends (`_Pages`). A forked child holds nothing.

Threads: `hold` runs on the training thread; `update` and `release` on any; `Link._run` on "ft-witness". `Link._lock`
guards what is shared; under it messages are sent, which never blocks.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from ft_core.witness import process, robust_mutex
from ft_core.witness.robust_mutex import RobustMutex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ADDRESS, OFF = "FT_WITNESS", "off"
"""The variable with the path of the socket at which ftrun's keeper is a witness; OFF: there is to be none."""
RENEWALS = 3
"""How often a witness that ended is replaced."""
END_S = 2.0
"""How long a witness that is not needed any more may take to end before it is killed."""

log = logging.getLogger("ft_core")


class _Page:
    """One mutex that the thread which made this holds."""

    def __init__(self, connections: Callable[[], Iterable[int]]) -> None:
        self.connections = connections
        self.thread_id = threading.get_native_id()
        self.mutex = RobustMutex()
        self.mutex.lock()

    def let_go(self) -> None:
        """By the thread that made it."""
        self.mutex.unlock()
        self.mutex.close()


class _Pages(threading.local):
    """The pages whose mutexes this thread holds: unlocked here, at the latest when the thread ends."""

    def __init__(self) -> None:
        self.held: list[_Page] = []
        self.ending = _Ending(self.held)


class _Ending:
    """Unlocks what a thread holds when the thread's local storage goes, which happens on that thread."""

    def __init__(self, held: list[_Page]) -> None:
        self._held = held
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            for page in self._held:
                page.mutex.mark_regular()
                if not sys.is_finalizing():  # then a thread that was ended may hold the link's lock for ever
                    _link.remove(page)
                page.let_go()


class DeathNotice:
    """What makes the death of the process of one Manager known at once.

    Args:
        connections: returns the descriptors of the connections whose end shows this process's death to others.
    """

    def __init__(self, connections: Callable[[], Iterable[int]]) -> None:
        self._connections = connections
        self._page: _Page | None = None
        self.holder = 0
        """threading.get_ident() of the thread that called `hold`; 0: none did."""

    def __repr__(self) -> str:
        return f"DeathNotice({'watched' if self._page else 'not watched'}, {_link!r})"

    def hold(self) -> None:
        """Have the death of the calling thread watched from now on, and of no other for this Manager."""
        self.release()
        self.holder = threading.get_ident()  # also if nothing comes of it: not tried again at every step
        if os.environ.get(ADDRESS) == OFF:
            return
        if not robust_mutex.SUPPORTED:
            _link.give_up(f"this system ({sys.platform}) has no robust mutexes")
        if _link.given_up:
            return
        try:
            page = _Page(self._connections)
        except OSError as error:
            _link.give_up(f"a robust mutex cannot be had: {error}")
            return
        self._page = page
        _pages.held.append(page)
        _link.add(page)

    def update(self) -> None:
        """Have what `connections` returns now ended with this process, instead of what it returned before."""
        page = self._page
        if page is not None:
            _link.update(page)

    def release(self) -> None:
        """The end of this process is no death from now on: it ends regularly, or trains no more. Idempotent."""
        page, self._page, self.holder = self._page, None, 0
        if page is not None:
            page.mutex.mark_regular()
            _link.remove(page)
            page.connections = tuple  # the thread that holds it may keep the page for long, and not what knows these
        for held in [held for held in _pages.held if held.mutex.regular]:
            _pages.held.remove(held)
            held.let_go()


class Link:
    """The connection of this process with its witness, and the thread that keeps it."""

    def __init__(self) -> None:
        self.given_up = False
        self._lock = threading.Lock()
        self._pages: dict[_Page, int] = {}
        self._numbers = itertools.count(1)
        self._socket: socket.socket | None = None
        self._running = False

    def __repr__(self) -> str:
        state = "given up" if self.given_up else "up" if self._socket else "down"
        return f"Link({state}, watching={len(self._pages)})"

    def add(self, page: _Page) -> None:
        """Have a page watched."""
        with self._lock:
            self._pages[page] = next(self._numbers)
            self._introduce(page)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="ft-witness", daemon=True).start()

    def update(self, page: _Page) -> None:
        """Send the connections that end with the holder of a page."""
        with self._lock:
            self._send_connections(page)

    def remove(self, page: _Page) -> None:
        """Have a page not watched any more. The witness stays: the next Manager of this process needs it again."""
        with self._lock:
            number = self._pages.pop(page, None)
            if number is not None:
                self._send(process.RELEASE, number)

    def mark_regular(self) -> None:
        """The interpreter ends: whatever becomes of its threads now is no death."""
        for page in list(self._pages):
            page.mutex.mark_regular()

    def give_up(self, why: str) -> None:
        """There is no witness for this process. Logged once."""
        if not self.given_up:
            self.given_up = True
            log.warning(
                "no witness for this process: %s. Should it be killed, its peers learn of it when the kernel has freed "
                "its memory, not before",
                why,
            )

    def become_child(self) -> None:
        """In a forked child: the parent's link and pages are the parent's."""
        if self._socket is not None:
            self._socket.close()
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread that is not here

    # ------------------------------------------------------------ messages (lock held)

    def _introduce(self, page: _Page) -> None:
        stats = []
        for path in (f"/proc/self/task/{page.thread_id}/stat", "/proc/self/stat"):
            with contextlib.suppress(OSError):  # no /proc, or not for everybody
                stats.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        try:
            self._send(process.WATCH, self._pages[page], [page.mutex.fd, *stats])
        finally:
            for fd in stats:
                os.close(fd)
        self._send_connections(page)

    def _send_connections(self, page: _Page) -> None:
        number = self._pages.get(page)
        if number is None or self._socket is None:
            return
        fds = sorted(page.connections())[: process.MAX_FDS]
        for start in range(0, max(1, len(fds)), process.FDS_PER_MESSAGE):
            what = process.MORE if start else process.CONNECTIONS
            self._send(what, number, fds[start : start + process.FDS_PER_MESSAGE])

    def _send(self, what: int, number: int, fds: Iterable[int] = ()) -> None:
        if self._socket is None:
            return
        data = process.HEAD.pack(what, number)
        pinned = []
        try:
            for fd in fds:
                with contextlib.suppress(OSError):  # its owner has closed it meanwhile
                    pinned.append(os.dup(fd))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", pinned))] if pinned else []
            self._socket.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            self._close()  # it is gone, or does not read: `_run` starts another
        finally:
            for fd in pinned:
                os.close(fd)

    def _close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        ended = 0
        while ended <= RENEWALS:
            try:
                link, child = _start_witness()
            except OSError as error:
                self._end(f"it cannot be started: {error}")
                return
            with self._lock:
                self._socket = link
                for page in self._pages:
                    self._introduce(page)
            with contextlib.suppress(OSError):
                link.recv(1)  # it sends nothing: this returns when it has ended, or does not read what it is sent
            with self._lock:
                self._socket = None
            link.close()
            _reap(child)
            ended += 1
        self._end(f"it ended {ended} times")

    def _end(self, why: str) -> None:
        self.give_up(why)
        with self._lock:
            self._running = False
            self._pages.clear()


def _start_witness() -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Connect to ftrun's keeper, or start a process for this one alone. Raises OSError."""
    address = os.environ.get(ADDRESS)
    if not sys.executable:
        raise OSError("sys.executable does not name a Python")
    if address:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(address)
        except OSError:
            link.close()  # the keeper was killed: its successor looks after the next process
        else:
            return link, None
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", process.__file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                start_new_session=True, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
    except BaseException:
        mine.close()
        raise
    return mine, child


def _reap(child: subprocess.Popen[bytes] | None) -> None:
    if child is None:
        return
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:  # somebody has stopped it
        child.kill()
        child.wait()


_pages = _Pages()
_link = Link()


def _after_fork_in_child() -> None:
    _link.become_child()
    _pages.__init__()  # type: ignore[misc]  # what the forking thread holds is not this one's


atexit.register(_link.mark_regular)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
