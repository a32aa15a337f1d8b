"""`FakeProcessGroupWrapper`: fails on command, for tests of what is built on process groups.

`report_configure_error(e)`: the next configure raises `e`. `report_future_error(e)`: the next collective really runs,
and then its work's wait and future fail with `e`. Each fires once. Threads: the one that drives the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.process_group.done_work import DoneWork
from ft_core.process_group.wrappers.wrapper import ProcessGroupWrapper

if TYPE_CHECKING:
    from torch.distributed import Work

    from ft_core.process_group.base import ProcessGroup


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Passes everything on to `pg`, except for the errors that were asked for."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._future_error: Exception | None = None
        self._configure_error: Exception | None = None
        self._error: Exception | None = None

    def report_future_error(self, error: Exception) -> None:
        """Have the next collective's work fail with `error`."""
        self._future_error = error

    def report_configure_error(self, error: Exception) -> None:
        """Have the next configure raise `error`."""
        self._configure_error = error

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Configure the wrapped group, or raise what was asked for."""
        self._error = None
        error, self._configure_error = self._configure_error, None
        if error is not None:
            raise error
        super().configure(store_addr, replica_id, rank, world_size)

    def errored(self) -> Exception | None:
        """Return an error that fired since the last configure, or the wrapped group's."""
        return self._error or super().errored()

    def _launch(self, name: str, *arguments: Any) -> Work:
        work = super()._launch(name, *arguments)
        error, self._future_error = self._future_error, None
        if error is None:
            return work
        work.wait()  # the peers' halves of it must not stay behind
        self._error = error
        return DoneWork(arguments[0], error)
