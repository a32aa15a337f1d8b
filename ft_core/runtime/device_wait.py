"""The host's wait for a device: until it has done what was queued, or until the quorum that it was queued in is over.

How it works. On a group that does not block the host a collective that was aborted ends like any other, with anything
in its tensors. What tells is the group's error, which is latched before its abort begins to end anything. So whoever
sees a mark reached that lies behind the last collective, and looks for the error *after* that, knows that nothing was
cut short if there is none. Looked for before, an abort between the two looks would go unseen.

A blocking wait of the device's own is never used: it could not be ended by a push, a timeout or an abort, which find
this rank here. Nothing here counts time: the limit is the collective timeout's (`collective_limits`), which aborts.

The kernel rounds a sleep up by its timer slack, 50 us unless a thread asks for less, which would be the device's idle
time at the end of each step: the threads that wait here ask for 1 us.

Threads: any; nothing is held.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ft_core.device import Mark

POLL_S = 20e-6
"""Between two looks. A core is some percent busy with looking."""
SLACK_NS = 1000
_PR_SET_TIMERSLACK = 29
_waits = threading.local()


def outlast(marks: Iterable[Mark], cut_short: Callable[[], Exception | None]) -> None:
    """Wait until all `marks` are reached. Raises what `cut_short` returns, then, or while it waits."""
    left = list(marks)
    if left:
        _sleep_exactly()
    while True:
        left = [mark for mark in left if not mark.query()]
        error = cut_short()
        if error is not None:
            raise error
        if not left:
            return
        time.sleep(POLL_S)


def _sleep_exactly() -> None:
    """Ask for this thread's sleeps not to be rounded up, once."""
    if not hasattr(_waits, "exactly"):
        _waits.exactly = sys.platform == "linux" and not ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
