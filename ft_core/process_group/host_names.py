"""`stop_asking`: c10d asks no name server any more for the host names at the ends of a store connection.

Whenever a client of a TCPStore connects, and whenever the store accepts, c10d looks up the other end's host name for
its log messages, whether or not one is written. A lost packet on the way to the name server (or none that answers)
costs the resolver's timeout, 5 s by default: in a Manager's constructor, in the middle of a recovery, and, on the
store's side, for every client at once, because the store has one thread only.

How it works. From torch 2.9 on, c10d gives names up for the rest of the process once a look-up has failed, and writes
addresses instead. So one is made to fail, at once and without sending anything: on a thread of its own whose resolver
has no name server (glibc keeps the resolver's state per thread), a store is opened and dropped. c10d's warning about
that one look-up is not written. Look-ups of the user's and of other libraries are left as they are.

Nothing changes where this is not possible: an older torch, another C library, or a system that resolves names through
a service of its own (nss-resolve), which bounds the wait itself.

Threads: any; the first caller does it, the others wait for it. A forked child inherits c10d's decision.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""How long the thread that does it is waited for; it takes 3 ms."""
_ERRORS_ONLY = 2

_lock = threading.Lock()
_done = False


class _ResolverState(ctypes.Structure):
    """The head of glibc's `struct __res_state` (resolv.h)."""

    _fields_ = (
        ("retransmit_s", ctypes.c_int),
        ("tries", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("name_servers", ctypes.c_int),
    )


def stop_asking() -> None:
    """Keep c10d from asking a name server from now on, in all of this process; idempotent."""
    global _done
    if _done:
        return
    with _lock:
        if _done:
            return
        thread = threading.Thread(target=_fail_once, name="ft-host-names", daemon=True)
        thread.start()
        thread.join(WAIT_S)
        _done = True


def _fail_once() -> None:
    try:
        libc = ctypes.CDLL(None)
        initialise, state_of_thread = libc["__res_init"], libc["__res_state"]
    except (OSError, AttributeError):
        return  # not glibc: see the header
    state_of_thread.restype = ctypes.POINTER(_ResolverState)
    if initialise() != 0:
        return
    state_of_thread().contents.name_servers = 0
    try:
        with _no_warning():
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        logger.debug("c10d goes on looking up host names: %s", error)


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """c10d's warnings are not written meanwhile (some milliseconds, once in a process)."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield  # then it is written: one line
        return
    before, level.value = level.value, max(level.value, _ERRORS_ONLY)
    try:
        yield
    finally:
        level.value = before


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not here may hold it


if sys.platform != "linux":
    _done = True
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
