"""Time limits for torch futures and for blocks of code.

One daemon thread holds every deadline of the process in a heap; nothing starts a thread per call. Callbacks run on
that thread (or, if the future completes first, on the one that completes it), so they must be short and must not wait
for another deadline. A forked child starts with no deadlines: those of its parent stay with the parent.
"""

from __future__ import annotations

import copy
import heapq
import logging
import os
import threading
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch.futures import Future

from ft_core.errors import ConfigError, PeerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FutureTimeoutError", "context_timeout", "fail_future", "future_timeout", "future_wait", "stream_timeout"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_DEADLINES = 100_000
"""Open deadlines in one process; more than this is a leak in the caller, and refused."""

COMPACT_AT = 1_024
"""Cancelled deadlines stay in the heap until they are this many and outnumber the open ones."""


class FutureTimeoutError(PeerError, TimeoutError):
    """A future did not complete in the time it was given."""


MAX_CAUSES = 16
"""Of an error that a future keeps, so many of its causes are kept."""


def fail_future(future: Future[Any], error: Exception) -> None:
    """Complete `future` with `error`; each wait raises a copy.

    torch's own `set_exception` raises the exception that it keeps, whose traceback then holds the frames of all who
    have waited. They hold the future, through C++, where Python's collector does not see it: the work, its process
    group and whatever else these frames know would never be let go.
    """
    future._set_unwrap_func(_raise_copy)
    future.set_result(_without_frames(error))


def _raise_copy(kept: Exception) -> NoReturn:
    raise _without_frames(kept)


def _without_frames(error: BaseException, causes: int = MAX_CAUSES) -> BaseException:
    """A copy without traceback, as are its causes; itself, if it cannot be copied."""
    try:
        found = copy.copy(error)
        if type(found) is not type(error) or str(found) != str(error):
            found = error
    except Exception:  # noqa: BLE001 - a class of the script's, made in a way of its own
        found = error
    found.__traceback__ = found.__context__ = None
    cause = error.__cause__
    found.__cause__ = _without_frames(cause, causes - 1) if cause is not None and causes else None
    return found


class _Deadline:
    """A callback due at `due` (monotonic seconds); `callback` is None once it was taken: run, or cancelled."""

    __slots__ = ("callback", "due", "number")

    def __init__(self, due: float, number: int, callback: Callable[[], None]) -> None:
        self.due = due
        self.number = number
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: _Deadline) -> bool:
        return (self.due, self.number) < (other.due, other.number)


class _Timer:
    """Runs callbacks at their deadlines on one daemon thread, started with the first deadline.

    All attributes are guarded by `_changed`, and so is every deadline's `callback`: whoever takes it out under the
    lock, the thread or `cancel`, is the only one to act on it.
    """

    def __init__(self, max_deadlines: int = MAX_DEADLINES, compact_at: int = COMPACT_AT) -> None:
        self._max_deadlines = max_deadlines
        self._compact_at = compact_at
        self._changed = threading.Condition()
        self._heap: list[_Deadline] = []
        self._cancelled = 0
        """How many of `_heap` are cancelled."""
        self._numbers = 0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        with self._changed:
            return f"_Timer(open={len(self._heap) - self._cancelled}, held={len(self._heap)})"

    def schedule(self, delay_s: float, callback: Callable[[], None]) -> _Deadline:
        """Run `callback` after `delay_s` seconds unless it is cancelled before."""
        with self._changed:
            if len(self._heap) - self._cancelled >= self._max_deadlines:
                raise UsageError(
                    f"{self._max_deadlines} timeouts are open already: futures are created, never completed"
                )
            self._numbers += 1
            deadline = _Deadline(time.monotonic() + max(0.0, delay_s), self._numbers, callback)
            heapq.heappush(self._heap, deadline)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ft-timer", daemon=True)
                self._thread.start()
            elif self._heap[0] is deadline:
                self._changed.notify()
        return deadline

    def cancel(self, deadline: _Deadline) -> bool:
        """Make sure that the callback does not run from now on; False if it was run, or cancelled, before."""
        with self._changed:
            if deadline.callback is None:
                return False
            deadline.callback = None
            self._cancelled += 1
            if self._cancelled >= self._compact_at and 2 * self._cancelled >= len(self._heap):
                self._heap = [kept for kept in self._heap if kept.callback is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0
            return True

    def _run(self) -> None:
        while True:
            callback = self._next()
            try:
                callback()
            except Exception:
                logger.exception("a timeout's callback failed")
            del callback  # else its references would live until the next deadline

    def _next(self) -> Callable[[], None]:
        """Wait for the next callback that is due and take it."""
        with self._changed:
            while True:
                while self._heap and self._heap[0].callback is None:
                    heapq.heappop(self._heap)
                    self._cancelled -= 1
                if not self._heap:
                    self._changed.wait()
                    continue
                wait_s = self._heap[0].due - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
                    continue
                deadline = heapq.heappop(self._heap)
                callback, deadline.callback = deadline.callback, None  # taken: a `cancel` from now on is too late
                assert callback is not None
                return callback


_timer = _Timer()


def _forget_in_child() -> None:
    # The thread does not exist in the child and the lock may have been held by it at the fork.
    global _timer
    _timer = _Timer()


os.register_at_fork(after_in_child=_forget_in_child)


def _seconds(timeout: timedelta) -> float:
    if not isinstance(timeout, timedelta):
        raise ConfigError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    return timeout.total_seconds()


def devices_of_futures() -> list[int | str | torch.device] | None:
    """Devices whose tensors a new future may carry: torch refuses a result on a device that was not named."""
    if not torch.cuda.is_initialized():
        return None
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def future_timeout(fut: Future[T], timeout: timedelta) -> Future[T]:
    """Give `fut` a time limit.

    Returns:
        A new future that takes the result or the exception of `fut`, or fails with `FutureTimeoutError` (a
        `TimeoutError`) if `fut` is not done after `timeout`. `fut` itself is left as it is.

    Raises:
        ConfigError: `timeout` is not a timedelta.
        UsageError: too many timeouts are open (`MAX_DEADLINES`).
    """
    delay_s = _seconds(timeout)
    timed: Future[T] = Future(devices=devices_of_futures())
    timer = _timer
    deadline: _Deadline | None = None

    def expire() -> None:
        fail_future(timed, FutureTimeoutError(f"future did not complete within {delay_s:g} s"))

    def complete(done: Future[T]) -> None:
        if deadline is not None and not timer.cancel(deadline):
            return
        try:
            result = done.wait()
        except Exception as error:  # noqa: BLE001  # whatever it failed with is handed on
            fail_future(timed, error)
        else:
            timed.set_result(result)

    if not fut.done():
        deadline = timer.schedule(delay_s, expire)
    fut.add_done_callback(complete)
    return timed


def future_wait(fut: Future[T], timeout: timedelta) -> T:
    """Wait for `fut` for at most `timeout` and return its value.

    Raises:
        FutureTimeoutError: not done in time (a `TimeoutError`). Whatever `fut` failed with is raised as it is.
        ConfigError: `timeout` is not a timedelta.
    """
    delay_s = _seconds(timeout)
    done = threading.Event()

    # Waiting for an event of our own leaves the timer out of it, and with it the queue of callbacks it may have.
    fut.add_done_callback(lambda _: done.set())
    if not done.wait(max(0.0, delay_s)):
        raise FutureTimeoutError(f"future did not complete within {delay_s:g} s")
    return fut.wait()


@contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Iterator[None]:
    """Call `callback` (for example a process group's `abort`) if the block takes longer than `timeout`.

    The block itself is not interrupted. `callback` runs on the timer's thread, at most once, and may still be running
    when the block ends.
    """
    timer = _timer
    deadline = timer.schedule(_seconds(timeout), callback)
    try:
        yield
    finally:
        timer.cancel(deadline)


_looked_at: deque[torch.Event] = deque()
"""Events of `stream_timeout` whose time is over: freed by its next caller, because that can block, and the timer's
thread has the other deadlines to serve."""


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Call `callback` if what the accelerator's current stream has been given so far is not done after `timeout`.

    Returns at once. `callback` runs on the timer's thread, at most once. On a machine without an accelerator nothing is
    ever pending, so it is not called.

    Raises:
        ConfigError: `timeout` is not a timedelta.
        UsageError: too many timeouts are open (`MAX_DEADLINES`).
    """
    delay_s = _seconds(timeout)
    _looked_at.clear()
    if not torch.accelerator.is_available():
        return
    event = torch.Event()
    event.record()

    def look() -> None:
        done = event.query()
        _looked_at.append(event)
        if not done:
            callback()

    _timer.schedule(delay_s, look)
