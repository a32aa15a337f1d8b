"""Waiting for one descriptor. With poll: select knows no number above 1,023, and a training process has more."""

from __future__ import annotations

import select


def readable(fd: int, within_s: float) -> bool:
    """Whether there is something to read within so many seconds: of a process' descriptor, its end."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
