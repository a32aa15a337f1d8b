"""A robust pthread mutex in a page that two processes share: the kernel releases it first when its holder dies.

How it works. The page is an anonymous file (memfd), so that it needs no /dev/shm and no name. The kernel walks the list
of the robust mutexes that a thread holds as the first act of that thread's end, before the process's memory and
descriptors go, and whoever waits for one of them gets EOWNERDEAD (pthread_mutex_lock(3p), robust futexes: the kernel's
Documentation/locking/robust-futexes). The list is per thread, and is left behind by exec, too; a forked child owns
nothing. One byte beside the mutex shows that the holder is letting go of it by intention.

Invariant: only the thread that locked it unlocks it. Nothing here needs torch. Threads: `lock` and `unlock` by the
holder, `wait` by a thread of the witness that has nothing else to do; `mark_regular` by any thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

PAGE_BYTES = 4096
_MUTEX_BYTES = 64
"""Room for a pthread_mutex_t, which has 40 to 48 bytes on the systems we know."""
_REGULAR_AT = 64
"""Offset of the byte that shows that the holder ends regularly."""
_SHARED = 1  # PTHREAD_PROCESS_SHARED
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST

_FUNCTIONS = (
    "pthread_mutexattr_init", "pthread_mutexattr_setpshared", "pthread_mutexattr_setrobust", "pthread_mutex_init",
    "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_mutex_trylock",
)  # fmt: skip
# Calls through CDLL give up the GIL: waiting for the mutex must not hold anybody.
_libc = ctypes.CDLL(None)
SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create") and all(hasattr(_libc, f) for f in _FUNCTIONS)
"""Whether this system has what is needed; otherwise nothing here may be called."""


class RobustMutex:
    """One page with one mutex. `fd` is its file; the constructor maps it.

    Args:
        fd: of a page that another process made; it stays the caller's. None: make a new page with a new mutex.

    Raises:
        OSError: no descriptor, no memory, or a libc that refuses robust mutexes.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            self.fd = os.memfd_create("ft-witness", os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.fd, PAGE_BYTES)
                self._map(self.fd)
                self._initialise()
            except BaseException:
                os.close(self.fd)
                raise
        else:
            self.fd = fd
            self._map(fd)

    def __repr__(self) -> str:
        return f"RobustMutex(fd={self.fd}, {'ends regularly' if self.regular else 'held or free'})"

    def _map(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._mutex = (ctypes.c_char * _MUTEX_BYTES).from_buffer(self._page)

    def _initialise(self) -> None:
        attributes = ctypes.create_string_buffer(_MUTEX_BYTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._mutex, attributes))

    def lock(self) -> None:
        """Take the mutex, which nobody else may hold. Raises OSError if somebody does."""
        _check(_libc.pthread_mutex_trylock(self._mutex))

    def unlock(self) -> None:
        """Let go of it, by the thread that locked it; whoever waits learns that this was no death."""
        self.mark_regular()
        _check(_libc.pthread_mutex_unlock(self._mutex))

    def close(self) -> None:
        """Give the descriptor back; the page stays mapped until nobody refers to this any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def mark_regular(self) -> None:
        """From now on the end of the holder is a regular one."""
        self._page[_REGULAR_AT] = 1

    @property
    def regular(self) -> bool:
        """The holder has let go of it by intention, or is about to end regularly."""
        return self._page[_REGULAR_AT] != 0

    def wait(self) -> bool:
        """Wait until the holder lets go of it. True if it died while holding it."""
        result = _libc.pthread_mutex_lock(self._mutex)
        if result == 0:
            _libc.pthread_mutex_unlock(self._mutex)
        return bool(result == errno.EOWNERDEAD) and not self.regular


def _check(result: int) -> None:
    if result != 0:
        raise OSError(result, os.strerror(result))
