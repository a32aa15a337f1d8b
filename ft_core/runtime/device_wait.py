"""The host's wait for a device: until it has done what was queued, or until the quorum that it was queued in is over.

How it works. On a group that does not block the host a collective that was aborted ends like any other, with anything
in its tensors. What tells is the group's error, which is latched before its abort begins to end anything. So whoever
sees a mark reached that lies behind the last collective, and looks for the error *after* that, knows that nothing was
cut short if there is none. Looked for before, an abort between the two looks would go unseen.

A blocking wait of the device's own is never used: it could not be ended by a push, a timeout or an abort, which find
this rank here. Nothing here counts time: the limit is the collective timeout's (`collective_limits`), which aborts.

Threads: any; nothing is held.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ft_core.device import Mark

POLL_S = 20e-6
"""Between two looks; what the kernel makes of it is below 100 us. A core is 3 % busy with looking."""


def outlast(marks: Iterable[Mark], cut_short: Callable[[], Exception | None]) -> None:
    """Wait until all `marks` are reached. Raises what `cut_short` returns, then, or while it waits."""
    left = list(marks)
    while True:
        left = [mark for mark in left if not mark.query()]
        error = cut_short()
        if error is not None:
            raise error
        if not left:
            return
        time.sleep(POLL_S)
