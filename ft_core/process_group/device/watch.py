"""The one thread that looks after the device groups of this process: collectives that take too long, and errors.

How it works. Nobody waits for a device's collective on the host, so nobody would see that it hangs, or that the
library has found a peer gone. This thread looks at each group with collectives in flight every POLL_S, and sleeps
while there are none. `Incarnation.look` does it.

Invariants: a look never blocks in anything but the driver; the deadline of an abort does not depend on this thread. It
ends when there is no group left, and is started again with the next. At most one.
Threads: `add`, `remove` and `wake` from any; the rest is "ft-device-watch".
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Protocol

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""How late a failure or a collective's timeout may be seen; one look costs some 10 us per group."""


class Watched(Protocol):
    """What is looked after: an `Incarnation`."""

    def look(self) -> bool:
        """Find what has ended, failed, or takes too long. Returns whether something is in flight."""
        ...


class Watch:
    """Looks after the groups that were added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: tuple[Watched, ...] = ()
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Watch({len(self._groups)} groups)"

    def add(self, group: Watched) -> None:
        """Look after it from now on."""
        with self._lock:
            self._groups = (*self._groups, group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ft-device-watch", daemon=True)
                self._thread.start()
        self._awake.set()

    def remove(self, group: Watched) -> None:
        """Do not, any more; idempotent."""
        with self._lock:
            self._groups = tuple(other for other in self._groups if other is not group)
        self._awake.set()

    def wake(self) -> None:
        """Something was launched."""
        if not self._awake.is_set():
            self._awake.set()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._awake.wait()
            self._awake.clear()
            with self._lock:
                groups = self._groups
                if not groups:
                    self._thread = None
                    return
            if any([self._look(group) for group in groups]):  # noqa: C419 - all of them, not up to the first
                self._awake.set()
                pause.wait(POLL_S)

    @staticmethod
    def _look(group: Watched) -> bool:
        try:
            return group.look()
        except Exception:
            logger.exception("a device group could not be looked at: %r", group)
            return False


watch = Watch()


def _after_fork_in_child() -> None:
    global watch
    watch = Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
