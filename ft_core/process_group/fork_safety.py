"""Forked children let go of the data plane's sockets.

A DataLoader worker is a fork of the trainer and holds a copy of every descriptor. As long as it lives, a connection
of a trainer that was killed stays open, and its peers do not notice the death. So every owner of sockets registers a
provider of descriptors here, and each child, first thing after the fork, parks them.

Parking puts /dev/null in the descriptor's place rather than closing it: the child still has the C++ objects that
believe to own that number, and a number freed under them would be given to the child's next file, which they would
then close.

Invariants: nothing is ever shut down in the child (that would end the parent's connection). Providers run in the child,
where other threads' locks may be held for ever: a provider takes no lock. The number of providers is bounded, and a
provider that is a method of a collected object drops out by itself.

Threads: `close_in_child` from any; the rest runs in a forked child's only thread. Children made by C code (not
`os.fork`) do not run these handlers.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable
from types import MethodType

from ft_core.errors import UsageError

MAX_PROVIDERS = 4096

FdProvider = Callable[[], Iterable[int]]

_providers: dict[int, Callable[[], FdProvider | None]] = {}
_last_key = 0


def close_in_child(fd_provider: FdProvider) -> Callable[[], None]:
    """Have every forked child drop the descriptors that `fd_provider()`, called in the child, returns.

    A bound method is held weakly, so that registering does not keep its object alive; a plain function strongly.
    Returns a function that takes the registration back (idempotent). Raises UsageError beyond MAX_PROVIDERS.
    """
    global _last_key
    if len(_providers) >= MAX_PROVIDERS:
        for key, reference in list(_providers.items()):
            if reference() is None:
                _providers.pop(key, None)
        if len(_providers) >= MAX_PROVIDERS:
            raise UsageError(
                f"more than {MAX_PROVIDERS} providers of sockets to close after a fork; take old ones back"
            )
    _last_key += 1
    key = _last_key
    weak: Callable[[], FdProvider | None]
    if isinstance(fd_provider, MethodType):
        weak = weakref.WeakMethod(fd_provider, lambda _gone: _providers.pop(key, None))
    else:
        weak = lambda: fd_provider  # noqa: E731
    _providers[key] = weak

    def take_back() -> None:
        _providers.pop(key, None)

    return take_back


def _park_in_child() -> None:
    fds: set[int] = set()
    for reference in list(_providers.values()):
        provider = reference()
        if provider is not None:
            # One broken provider must not keep the others' sockets open; there is nobody here to report it to.
            with contextlib.suppress(Exception):
                fds.update(provider())
    if not fds:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_park_in_child)
