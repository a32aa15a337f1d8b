"""What `Manager.allreduce` returns: a Work that never fails; an error is reported to the Manager instead.

It is both a `torch.distributed.Work` (wait, get_future) and, for scripts written for the first versions of the
reference API, answers the methods of a future (value, then, done). Threads: any thread may wait; the error is reported
once, by whoever sees it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import Work
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch


class ManagedWork(Work):
    """A launched collective whose failure vetoes the step instead of raising."""

    def __init__(
        self, work: Work | None, tensor: torch.Tensor, report: Callable[[BaseException], None] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._tensor = tensor
        self._report = report

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensor is ready (or the collective failed: then its content is undefined)."""
        work, self._work = self._work, None
        if work is None:
            return True
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
            if self._report is not None:
                self._report(error)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that resolves to [tensor], also after a failure."""
        out: Future[list[torch.Tensor]] = Future()
        work = self._work
        if work is None:
            out.set_result([self._tensor])
            return out

        def settle(done: Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
                if self._report is not None:
                    self._report(error)
            out.set_result([self._tensor])

        work.get_future().add_done_callback(settle)
        return out

    def done(self) -> bool:
        """Whether the collective has ended."""
        return self.is_completed()

    def value(self) -> torch.Tensor:
        """Wait, then the tensor."""
        self.wait()
        return self._tensor

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Chain a callback on `get_future`."""
        return self.get_future().then(callback)


def finished_work(tensor: torch.Tensor) -> ManagedWork:
    """A work that has nothing left to do."""
    return ManagedWork(None, tensor)
