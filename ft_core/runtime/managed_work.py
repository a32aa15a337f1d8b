"""What `Manager.allreduce` returns: a Work that never fails; an error is reported to the Manager instead.

It is both a `torch.distributed.Work` (wait, get_future) and, for scripts written for the first versions of the
reference API, answers the methods of a future (wait, value, then, done), whose value is the tensor.

Inside a backward pass it is a `torch.futures.Future` as well, because there the caller is a communication hook of
torch's DDP, and torch's C++ takes nothing else from it. Not elsewhere: such a future has to be completed by Gloo's
thread as soon as the collective ends, which takes Python's lock away from whoever trains.

Threads: any thread may wait; the error is reported once, by whoever sees it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import Work
from torch.futures import Future

from ft_core.futures import devices_of_futures
from ft_core.reduction.autograd import NO_GRAPH_TASK, graph_task_id

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

    def wait(self, timeout: timedelta | None = None) -> torch.Tensor:  # type: ignore[override]  # a future's wait
        """Block until the tensor is ready (or the collective failed: then its content is undefined). Returns it."""
        work, self._work = self._work, None
        if work is None:
            return self._tensor
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
            if self._report is not None:
                self._report(error)
        return self._tensor

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def get_future(self) -> Future[torch.Tensor]:
        """A future that resolves to the tensor, also after a failure."""
        out: Future[torch.Tensor] = Future(devices=devices_of_futures())
        self._complete(out, self._report)
        return out

    def _complete(self, out: Future[torch.Tensor], report: Callable[[BaseException], None] | None) -> None:
        """Have `out` completed when the collective has ended."""
        work, tensor = self._work, self._tensor
        if work is None:
            out.set_result(tensor)
            return

        def settle(done: Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
                if report is not None:
                    report(error)
            out.set_result(tensor)

        work.get_future().add_done_callback(settle)

    def done(self) -> bool:
        """Whether the collective has ended."""
        return self.is_completed()

    def value(self) -> torch.Tensor:
        """Wait, then the tensor."""
        return self.wait()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Chain a callback on `get_future`."""
        return self.get_future().then(callback)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Have `get_future` call back."""
        self.get_future().add_done_callback(callback)


class ManagedFuture(ManagedWork, Future["torch.Tensor"]):  # wait and then are ManagedWork's
    """One that torch's C++ takes from a communication hook. A failure is reported by whoever waits for the work."""

    def __init__(
        self, work: Work | None, tensor: torch.Tensor, report: Callable[[BaseException], None] | None = None
    ) -> None:
        Future.__init__(self, devices=devices_of_futures())
        ManagedWork.__init__(self, work, tensor, report)
        self._complete(self, None)


def managed_work(
    work: Work | None, tensor: torch.Tensor, report: Callable[[BaseException], None] | None = None
) -> ManagedWork:
    """Of a collective that was launched; None: there is nothing left to do."""
    kind = ManagedWork if graph_task_id() == NO_GRAPH_TASK else ManagedFuture
    return kind(work, tensor, report)
