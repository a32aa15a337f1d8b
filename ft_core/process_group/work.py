"""The handles that collectives return: `GlooWork` over a running one, `DoneWork` for one with a known outcome.

Both are `torch.distributed.Work`, because c10d, DDP hooks and functional collectives all ask for that type.

How it works: `GlooWork` passes everything on to Gloo's own work and only turns a failure into a `CollectiveError` that
names the operation and the group, and reports it to the group (`errored()`). Waiting is possible from any thread, any
number of times. The future is Gloo's own: completing it takes no Python, so reading it costs nothing extra; its error is
Gloo's, and is reported to the group as well, by a callback.

Threads: any. Callbacks of a future run on the Gloo thread that completed it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from ft_core.errors import CollectiveError, NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable

NO_TIMEOUT = timedelta(0)  # c10d's "as long as the collective's own timeout"


class GlooWork(Work):
    """One collective in flight."""

    def __init__(self, name: str, inner: Work, failed: Callable[[str, Exception, bool], CollectiveError]) -> None:
        super().__init__()
        self._name = name
        self._inner = inner
        self._failed = failed

    def __repr__(self) -> str:
        state = "running" if not self.is_completed() else "done" if self.exception() is None else "failed"
        return f"GlooWork({self._name}, {state})"

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until it is done; CollectiveError if it failed, or if `timeout` (none by default) passed first."""
        try:
            return self._inner.wait(timeout) if timeout else self._inner.wait()
        except RuntimeError as error:
            # A wait that was given a time of its own and ran out of it says nothing about the collective.
            raise self._failed(self._name, error, not timeout or self._inner.is_completed()) from error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the result (collectives; Gloo has none for send and recv: NotAvailableError)."""
        try:
            future = self._inner.get_future()
        except RuntimeError as error:
            raise NotAvailableError(f"a future of {self._name} needs a Gloo that has one: wait() for it ({error})") from error
        future.add_done_callback(self._note_failure)
        return future

    def is_completed(self) -> bool:
        """Whether it ended, well or not (send and recv: only known after wait)."""
        return self._inner.is_completed()

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return the failure of a work that has ended, or None; never blocks."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except CollectiveError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._inner.result()

    def source_rank(self) -> int:
        """Return who sent what `recv_anysource` received."""
        return self._inner.source_rank()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    def synchronize(self) -> None:
        """Order the current device stream behind it (nothing to do for CPU tensors)."""
        self._inner.synchronize()

    def _note_failure(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            self._failed(self._name, error, True)


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
            self._future.set_exception(error)

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
        """Always."""
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
        """Nothing to do."""
