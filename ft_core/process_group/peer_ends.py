"""A watch on the connections of a process group: reports at once that a peer has ended one, whoever waits or not.

How it works. Gloo reports it only to who waits in a collective. So a thread of our own waits for the end of the
connections that the group was formed with (EPOLLRDHUP, and nothing else: data that arrive wake nobody). Each group has
an epoll instance of its own; when the next group has formed the thread is woken and looks at that one.

Invariants: a descriptor is neither duplicated nor kept open here: epoll forgets a connection when its last descriptor
is closed. `ended` is called at most once per group. Where the system has no epoll nothing is watched.
Threads: `watch` and `stop` from any; `ended` is called on "ft-peers-*".
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SUPPORTED = hasattr(select, "epoll") and hasattr(os, "eventfd")
STOP_S = 5.0
"""How long `stop` waits for the thread, which waits for nothing but events."""


class PeerEnds:
    """Watches the connections of one group at a time.

    Args:
        name: of this replica, for the thread's name.
        ended: called with the number that `watch` was given, when a peer has ended one of its connections.
    """

    def __init__(self, name: str, ended: Callable[[int], None]) -> None:
        self._name = name
        self._ended = ended
        self._lock = threading.Lock()
        self._watched: tuple[int, select.epoll] | None = None
        self._wake = -1
        self._stopped = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        watched = self._watched
        return f"PeerEnds({self._name}, {'nothing' if watched is None else f'{watched[0]:#x}'})"

    def watch(self, number: int, fds: Iterable[int]) -> None:
        """Watch the connected sockets `fds`, which belong to group `number`, instead of what was watched before."""
        if not SUPPORTED:
            return
        with self._lock:
            if self._stopped:
                return
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name=f"ft-peers-{self._name}", daemon=True)
            poller = select.epoll()
            poller.register(self._wake, select.EPOLLIN)
            for fd in fds:
                with contextlib.suppress(OSError):  # its owner has closed it: that group is being ended
                    poller.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
            self._watched = number, poller
            if not self._thread.is_alive():
                self._thread.start()
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._stopped = True
            thread = self._thread
            if thread is not None and self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)

    def _run(self) -> None:
        watched = self._watched
        assert watched is not None
        told = False
        while True:
            number, poller = watched
            events = poller.poll()
            with self._lock:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                current, stopped = self._watched, self._stopped
                if stopped:
                    os.close(self._wake)
                    self._wake = -1
            if stopped or current is not watched:
                poller.close()
            if stopped:
                if current is not None and current is not watched:
                    current[1].close()
                return
            assert current is not None
            if current is not watched:
                watched, told = current, False
            elif not told and any(fd != self._wake for fd, _ in events):
                told = True
                self._ended(number)
