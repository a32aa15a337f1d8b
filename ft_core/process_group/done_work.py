"""`DoneWork`: the handle of a collective whose outcome was known when it was returned. Threads: any."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from ft_core.futures import fail_future

NO_TIMEOUT = timedelta(0)  # c10d's "as long as the collective's own timeout"


class DoneWork(Work):
    """A work that ended before it was returned: with `result`, or with `error`."""

    def __init__(self, result: Any, error: Exception | None = None) -> None:
        super().__init__()
        self._result = result
        self._error = error
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        if error is None:
            self._future.set_result(result)
        else:
            fail_future(self._future, error)

    def __repr__(self) -> str:
        return "DoneWork()" if self._error is None else f"DoneWork({self._error!r})"

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002 - Work's signature
        """Return at once, or raise the error."""
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future."""
        return self._future

    def is_completed(self) -> bool:
        """True: it is done."""
        return True

    def is_success(self) -> bool:
        """Whether it holds a result."""
        return self._error is None

    def exception(self) -> Any:
        """Return the error, or None."""
        return self._error

    def result(self) -> Any:
        """Return the result."""
        return self._result

    def synchronize(self) -> None:
        """Do nothing: it is done."""
