"""Threads that are still inside Gloo when the interpreter ends: they must not end the process.

How it works. A thread that comes back from C++ to an interpreter that is ending is ended by Python, before 3.14, within
C++ functions that cannot be left that way: std::terminate, which says "terminate called" and, where a collective has
failed, Gloo's IoException. One that comes back to an interpreter that has ended reads freed memory. Such a thread waits
for a collective, or it is Gloo's own and completes a future that has callbacks in Python. When the interpreter ends,
all groups are aborted and waited for, which ends both within milliseconds. What remains is a send that Gloo has lost,
which its timeout ends some time (see work.py), and what a busy machine has not come to. Where something remains:

- std::terminate makes the thread that calls it sleep for ever, as Python does with such a thread from 3.14 on;
- the process ends with its status as soon as the interpreter has: what C's streams hold is written, and C++'s
  destructors of global objects are left out, in which it might spend its last moments beside these threads;
- where that has not come within LIMIT_S, as the thread that ends the interpreter sleeps itself, SIGALRM ends the
  process.

Invariant: asked for only where there is such a thread, as both are the whole process' business. Threads: the one that
ends the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import signal
import sys
import threading

LIMIT_S = 30
"""How long the interpreter may take to end, from then on."""
_FOLDER = str(pathlib.Path(__file__).parent)


def any_inside() -> bool:
    """Whether another of Python's threads is in a call that this package makes."""
    own = threading.get_ident()
    return any(
        frame.f_code.co_filename.startswith(_FOLDER) for ident, frame in sys._current_frames().items() if ident != own
    )


def outlast() -> None:
    """End the process as it was to end, whatever such threads do. Without effect where there is no GNU C library."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(ValueError):  # not the main thread, as where another one ends a sub-interpreter
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
    with contextlib.suppress(OSError, AttributeError):
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_terminate(_address(libc.pause))
    with contextlib.suppress(AttributeError):
        # Called in reverse order, with the process' status.
        libc.on_exit(_address(libc._exit), None)
        libc.__cxa_atexit(_address(libc.fflush), None, None)


def _address(function: object) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]  # the stubs do not know of functions
