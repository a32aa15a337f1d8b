"""What Gloo complains of, in one line of ours. Threads: any; nothing is kept."""

from __future__ import annotations

import re

from ft_core.errors import CollectiveError

_GLOO_NOISE = re.compile(r"^\[[^\]]*:\d+\] |\. This is typically caused by a remote worker.*$")


def wrap(what: str, cause: Exception) -> CollectiveError:
    """A CollectiveError that begins with `what`; `cause` itself if it is one."""
    if isinstance(cause, CollectiveError):
        return cause
    error = CollectiveError(f"{what}: {first_line(cause)}")
    error.__cause__ = cause
    return error


def first_line(error: BaseException) -> str:
    """Without Gloo's own file names and advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return _GLOO_NOISE.sub("", line)
