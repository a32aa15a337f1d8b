"""`BabyWork`: the handle of a collective that runs in a child process.

It is a `torch.distributed.Work`, because c10d, DDP hooks and functional collectives all ask for that type. It ends when
the child has reported its end, with the results copied back already, or when the child is dead; both are seen by the
group's reader thread, on which callbacks of the future run. Waiting is possible from any thread, any number of times.

On a device, `wait` blocks until the device has finished, unlike torch's own works, which only order a stream.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from ft_core.errors import CollectiveError
from ft_core.futures import fail_future
from ft_core.process_group.done_work import NO_TIMEOUT

if TYPE_CHECKING:
    from ft_core.process_group.spec import Spec


class BabyWork(Work):
    """One collective in a child process; `result` is what it gives, once it has ended."""

    def __init__(self, name: str, result: list[Any], group: Spec) -> None:
        super().__init__()
        self.collective = name
        self._result = result
        self._group = group
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._sender = -1
        self._future: torch.futures.Future[Any] | None = None
        self._notified = False

    def __repr__(self) -> str:
        state = "running" if not self._ended.is_set() else "done" if self._error is None else "failed"
        return f"BabyWork({self.collective}, {state})"

    def end(self, error: Exception | None, sender: int | None = None) -> None:
        """It has ended, well or with `error`: wake who waits. Called once, by the group, which then calls `notify`."""
        with self._lock:
            self._error = error
            self._sender = -1 if sender is None else sender
            self._ended.set()

    def notify(self) -> None:
        """Complete the future, whose callbacks run here; called once, after `end`, with no lock held."""
        with self._lock:
            future = self._future
            self._notified = True
        if future is not None:
            self._complete(future)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until it has ended; CollectiveError if it failed, or if `timeout` (none by default) passed first."""
        if not self._ended.wait(timeout.total_seconds() if timeout > NO_TIMEOUT else None):
            # Says nothing about the collective: not an error of the group.
            raise CollectiveError(
                f"{self.collective} on {self._group} timed out: {timeout.total_seconds():g} s of waiting are over"
            )
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors."""
        with self._lock:
            future = self._future
            if future is not None:
                return future
            future = self._future = torch.futures.Future()
            notified = self._notified
        if notified:
            self._complete(future)
        return future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Any:
        """Return the failure of a work that has ended, or None; never blocks."""
        return self._error

    def result(self) -> list[Any]:
        """Return the output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return who sent what `recv_anysource` received."""
        return self._sender

    def _source_rank(self) -> int:
        return self._sender

    def synchronize(self) -> None:
        """Do nothing: when it has ended, the device has finished, too."""

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            fail_future(future, self._error)


def overdue_at(oldest_launch: float, last_report: float, timeout_s: float, grace_s: float) -> float:
    """Return when a child that reports nothing counts as frozen.

    It ends collectives that take too long by itself, at their timeout: only one that does not even do that is frozen.
    Each report shows it alive, and collectives queue up behind each other, so the time counts from the last one.
    """
    return max(oldest_launch, last_report) + timeout_s + grace_s
