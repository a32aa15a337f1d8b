"""What a script prints that ends because of what became of its job: one line instead of a traceback.

How it works. A Manager installs an excepthook. It takes the errors that are no fault of the script's: the job finished
while this replica was away (JobFinishedError: there is nothing left to do, and the status is 0), or everybody who held
its state is gone (StateLostError: status 1). All others go to the hook that was there before.

Threads: the main thread; what ends another thread is threading's business.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ft_core.errors import JobFinishedError, StateLostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class LastWords:
    """The hook. `previous`: the one that was there."""

    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self._previous = previous

    def __repr__(self) -> str:
        return f"LastWords(before {self._previous!r})"

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The interpreter's last call. Raises SystemExit(0) if the job has finished, which it takes as the status."""
        if isinstance(error, JobFinishedError):
            sys.stderr.write(f"nothing left to do: {str(error).partition(';')[0]}\n")
            raise SystemExit(0)
        if isinstance(error, StateLostError):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return
        self._previous(kind, error, trace)


def install() -> None:
    """Put the hook before the one that is there. Does nothing where it is there already."""
    if not isinstance(sys.excepthook, LastWords):
        sys.excepthook = LastWords(sys.excepthook)
