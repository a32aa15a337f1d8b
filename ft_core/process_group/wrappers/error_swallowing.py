"""`ErrorSwallowingProcessGroupWrapper`: after an error the caller keeps going, with results that mean nothing.

For code that cannot stop in the middle of a step (a collective deep in a model): the error is kept, `error()` and
`errored()` give it, every collective after it is skipped, and the caller's own end-of-step check throws the step away.

Invariants: no collective and no wait on one raises a failure of the group (a caller's mistake, ConfigError and
UsageError, still is raised); the first error stays until the next configure; output tensors of what was swallowed are
unspecified. Threads: any; `_swallowed` is only ever set once per configure, a race keeps one of the errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from ft_core.errors import CollectiveError, ConfigError, PeerError, UsageError
from ft_core.process_group.done_work import NO_TIMEOUT, DoneWork
from ft_core.process_group.wrappers.wrapper import ProcessGroupWrapper

if TYPE_CHECKING:
    from datetime import timedelta


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Keeps errors of `pg` instead of raising them."""

    _swallowed: Exception | None = None

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Forget the error and configure the wrapped group (which does raise)."""
        self._swallowed = None
        super().configure(store_addr, replica_id, rank, world_size)

    def report_error(self, error: Exception) -> None:
        """Behave as if a collective had failed with `error`."""
        if self._swallowed is None:
            self._swallowed = error

    def error(self) -> Exception | None:
        """Return the first error since the last configure, or None."""
        return self._swallowed

    def errored(self) -> Exception | None:
        """Return the first error, swallowed or not yet seen."""
        return self._swallowed or super().errored()

    def _launch(self, name: str, *arguments: Any) -> Work:
        if self._swallowed is not None:
            return DoneWork(arguments[0])
        try:
            return _SwallowingWork(self, super()._launch(name, *arguments), arguments[0])
        except (ConfigError, UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - the point of this class
            self.report_error(error)
            return DoneWork(arguments[0])


class _SwallowingWork(Work):
    def __init__(self, group: ErrorSwallowingProcessGroupWrapper, inner: Work, default: Any) -> None:
        super().__init__()
        self._group = group
        self._inner = inner
        self._default = default

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        try:
            self._inner.wait(timeout)
        except Exception as error:  # noqa: BLE001 - the point of this class
            self._group.report_error(error)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        swallowed: torch.futures.Future[Any] = torch.futures.Future()

        def settle(future: torch.futures.Future[Any]) -> None:
            try:
                swallowed.set_result(future.value())
            except Exception as error:  # noqa: BLE001 - the point of this class
                self._group.report_error(error if isinstance(error, PeerError) else CollectiveError(str(error)))
                swallowed.set_result(self._default)

        self._inner.get_future().add_done_callback(settle)
        return swallowed

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_completed()

    def result(self) -> Any:
        return self._default

    def synchronize(self) -> None:
        self.wait()
