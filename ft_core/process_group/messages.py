"""What a library complains of, in one line of ours. Threads: any; nothing is kept."""

from __future__ import annotations

import errno
import os
import re

from ft_core.errors import CollectiveError, ThisMachineError

_GLOO_NOISE = re.compile(r"^\[[^\]]*:\d+\] |\. This is typically caused by a remote worker.*$")

_OF_THIS_MACHINE = tuple(os.strerror(number) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
"""Gloo hands on the system's error texts, not its numbers."""


def wrap(what: str, cause: Exception) -> CollectiveError:
    """A CollectiveError that begins with `what`; `cause` itself if it is one."""
    if isinstance(cause, CollectiveError):
        return cause
    line = first_line(cause)
    kind = ThisMachineError if any(text in line for text in _OF_THIS_MACHINE) else CollectiveError
    error = kind(f"{what}: {line}")
    error.__cause__ = cause
    return error


def first_line(error: BaseException) -> str:
    """Without Gloo's own file names and advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return _GLOO_NOISE.sub("", line)
