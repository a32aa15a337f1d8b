"""`ProcessGroupWrapper`: a process group that passes everything on to another one; base of those that change a little.

Invariants: every collective goes through `_launch`, so a subclass that wants to see or change them overrides only that.
The wrapper is registered with torch, not the wrapped group. Threads: those of the wrapped group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.process_group.base import ProcessGroup

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Work


class ProcessGroupWrapper(ProcessGroup):
    """Passes everything on to `pg`."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self._pg = pg

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pg!r})"

    @property
    def parent(self) -> ProcessGroup:
        """The wrapped group."""
        return self._pg

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Configure the wrapped group."""
        self._pg.configure(store_addr, replica_id, rank, world_size)
        self._update_registration(world_size)

    def _launch(self, name: str, *arguments: Any) -> Work:
        return self._pg._launch(name, *arguments)

    def abort(self) -> None:
        """Abort the wrapped group."""
        self._pg.abort()

    def errored(self) -> Exception | None:
        """Return the wrapped group's error."""
        return self._pg.errored()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the wrapped group's timeout."""
        self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        """Shut the wrapped group down, and unregister both."""
        self.unregister()
        self._pg.shutdown()

    def connection_fds(self) -> list[int]:
        """Return the wrapped group's connections."""
        return self._pg.connection_fds()

    @property
    def torch_backend(self) -> str:
        """Its kind."""
        return self._pg.torch_backend

    @property
    def carries_cpu_memory(self) -> bool:
        """Whether the wrapped group does."""
        return self._pg.carries_cpu_memory

    @property
    def blocks_host(self) -> bool:
        """Whether the wrapped group does."""
        return self._pg.blocks_host

    @property
    def torch_device_type(self) -> str:
        """Return the wrapped group's kind of device."""
        return self._pg.torch_device_type

    def sibling(self) -> ProcessGroup:
        """Return the same kind of wrapper around a sibling of the wrapped group."""
        return type(self)(self._pg.sibling())

    def getBackendName(self) -> str:
        """Return the wrapped group's name."""
        return self._pg.getBackendName()

    def size(self) -> int:
        """Return the wrapped group's size."""
        return self._pg.size()

    def rank(self) -> int:
        """Return the wrapped group's rank."""
        return self._pg.rank()
