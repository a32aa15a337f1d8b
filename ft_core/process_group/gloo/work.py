"""`GlooWork`: the handle of a collective that is running.

It is a `torch.distributed.Work`, because c10d, DDP hooks and functional collectives all ask for that type.

How it works: `GlooWork` passes everything on to Gloo's own work, turns a failure into a `CollectiveError` that names
the operation and the group, and reports it to the group (`errored()`). Waiting is possible from any thread, any
number of times.

Why it does not simply wait: Gloo can lose a send. If its loop thread writes to a connection in the very moment it
breaks, the connection is closed and the operation that was being written is never told (seen in about one of ten
aborts in a loop that does nothing but small allreduces, stack in UnboundBuffer::waitSend); it ends at the
collective's timeout only. So a wait runs in slices of SLICE; between two it looks whether the group was aborted or
has lost a connection, gives Gloo GRACE_S to end by itself (until then it may still write to the tensors), and then
fails. A future is completed by Gloo's, or, after an abort, by the reaper's thread under the same rule.

A work keeps its Gloo context alive, also after its group was destroyed. Whoever drops the last one destroys the
context, which joins Gloo's thread; in a forked child that thread does not exist, and joining it ends the child with
std::system_error once a thread of its own has taken over the stack. So a child keeps all works of its parent for ever.

Threads: any. Callbacks of a future run on the Gloo thread, or the reaper's, that completed it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work

from ft_core.errors import CollectiveError, NotAvailableError
from ft_core.futures import fail_future
from ft_core.process_group.done_work import NO_TIMEOUT

SLICE = timedelta(milliseconds=20)
GRACE_S = 0.05

_alive: weakref.WeakSet[GlooWork] = weakref.WeakSet()


class WorkOwner(Protocol):
    """What a work needs of the group that it runs on: an `Incarnation`."""

    def is_doomed(self) -> bool:
        """Whether what runs on it cannot end well any more."""
        ...

    def failed(self, name: str, cause: Exception, ended: bool = True) -> CollectiveError:
        """Return what to raise for a failure of the collective `name`."""
        ...

    def watch(self, outcome: Outcome) -> None:
        """Have the future failed after an abort, should Gloo not do it."""
        ...


class GlooWork(Work):
    """One collective in flight on an incarnation of a group.

    `limit`: of send, recv and the reduce-scatters, whose end c10d knows of only by waiting, and which it would give the
    time that connecting may take: how long a wait for one may last. None for the others: c10d has been told.
    """

    def __init__(self, name: str, inner: Work, incarnation: WorkOwner, limit: timedelta | None) -> None:
        super().__init__()
        self._name = name
        self._inner = inner
        self._incarnation = incarnation
        self._limit = limit
        _alive.add(self)

    def __repr__(self) -> str:
        state = "running" if not self.is_completed() else "done" if self.exception() is None else "failed"
        return f"GlooWork({self._name}, {state})"

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until it is done; CollectiveError if it failed, or if `timeout` passed first.

        By default that is the group's, from the launch on; of send, recv and the reduce-scatters from this call on.
        """
        if self._limit is not None:
            return self._wait_in_gloo(timeout or self._limit)
        inner = self._inner
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        doomed_at: float | None = None
        piece = SLICE
        while True:
            if deadline is not None:
                piece = min(SLICE, timedelta(seconds=max(0.001, deadline - time.monotonic())))
            try:
                return inner.wait(piece)
            except RuntimeError as error:
                if inner.is_completed():
                    # The slice may have run out in the moment it ended: ask again.
                    return self._wait_in_gloo(NO_TIMEOUT)
                now = time.monotonic()
                if self._incarnation.is_doomed():
                    doomed_at = doomed_at or now
                    if now - doomed_at >= GRACE_S:
                        raise self._incarnation.failed(self._name, _lost()) from None
                if deadline is not None and now >= deadline:
                    # Says nothing about the collective: not an error of the group.
                    raise self._incarnation.failed(self._name, error, ended=False) from error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors (Gloo has none for send and recv: NotAvailableError)."""
        try:
            inner = self._inner.get_future()
        except RuntimeError as error:
            raise NotAvailableError(
                f"a future of {self._name} needs a Gloo that has one; wait() for it: {error}"
            ) from error
        outcome = Outcome(self._name, self._incarnation)
        self._incarnation.watch(outcome)
        inner.add_done_callback(outcome.copy)
        return outcome.future

    def is_completed(self) -> bool:
        """Whether it ended, well or not (send, recv and the reduce-scatters: only known after wait)."""
        return self._inner.is_completed()

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return the failure of a work that has ended, or None; never blocks."""
        if not self.is_completed():
            return None
        try:
            self._wait_in_gloo(NO_TIMEOUT)
        except CollectiveError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._inner.result()

    def source_rank(self) -> int:
        """Return who sent what `recv_anysource` received."""
        return self._inner._source_rank()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    def synchronize(self) -> None:
        """Order the current device stream behind it (nothing to do for CPU tensors)."""
        self._inner.synchronize()

    def _wait_in_gloo(self, timeout: timedelta) -> bool:
        try:
            return self._inner.wait(timeout) if timeout else self._inner.wait()
        except RuntimeError as error:
            raise self._incarnation.failed(self._name, error) from error


class Outcome:
    """A future that is completed once, by whoever comes first: Gloo, or the reaper for a work that Gloo lost."""

    def __init__(self, name: str, incarnation: WorkOwner) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._name = name
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._done = False

    @property
    def is_done(self) -> bool:
        """Whether it is completed, or about to be."""
        return self._done

    def copy(self, inner: torch.futures.Future[Any]) -> None:
        """Gloo's future is done: take its outcome over."""
        try:
            value = inner.value()
        except RuntimeError as error:
            self.fail(error)
            return
        if self._first():
            self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Fail, unless it is completed."""
        failure = self._incarnation.failed(self._name, error)
        if self._first():
            fail_future(self.future, failure)

    def lose(self) -> None:
        """Fail a work that Gloo does not end."""
        self.fail(_lost())

    def _first(self) -> bool:
        with self._lock:
            first, self._done = not self._done, True
        return first


def _lost() -> Exception:
    return RuntimeError("the group was aborted, or lost a connection")


def _after_fork_in_child() -> None:
    for work in list(_alive):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(work._inner))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
