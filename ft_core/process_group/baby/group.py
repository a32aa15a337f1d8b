"""`ProcessGroupBaby`: a process group that runs in a child process; its kinds are in `kinds.py`.

How it works: it holds one `Incarnation` (one child with one formed group) at a time. `configure` ends the old one and
forms a new one in another child, which waits ready (children.py); `abort` kills the child. What a backend cannot be
trusted with, ending a group that hangs, is done by the kernel.

Invariants: as of `ProcessGroupGloo`: the newest `configure`, `abort` or `shutdown` wins; after an abort every
collective raises until a new configure; errors of an earlier incarnation never show in a later one. Mistakes in a
collective's arguments are raised by its work, where the inner group finds them. The time that a collective may take
counts from its launch, for messages (send, recv) too.

Threads: collectives from one thread at a time; everything else from any. `_lock` guards which incarnation is current.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group.baby import children as processes
from ft_core.process_group.baby.incarnation import Incarnation, Spec, check_place
from ft_core.process_group.baby.segments import SegmentPool
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.store_pool import parse_store_addr

if TYPE_CHECKING:
    from torch.distributed import Work

DEFAULT_TIMEOUT = timedelta(seconds=60)
SHUTDOWN_WAIT_S = 10.0
"""How long `shutdown` waits for the killed child to be gone; it takes milliseconds."""


class ProcessGroupBaby(ProcessGroup):
    """A group of `inner`'s kind in a child process. `timeout`: of forming, and of each collective."""

    inner = ""
    """Name of the class in ft_core.process_group that runs in the child."""
    label = ""
    """The backend's name in messages."""
    backend_name = ""
    on_device = False
    """Whether the child works on device memory, and on nothing else."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT, **arguments: Any) -> None:
        super().__init__()
        if timeout <= timedelta(0):
            raise ConfigError(f"timeout={timeout}: expected more than zero")
        self._timeout = timeout
        self._arguments = arguments
        self._pool = SegmentPool()
        self._lock = threading.Lock()
        self._incarnation: Incarnation | None = None
        self._is_shut_down = False
        processes.children.prepare()

    def __repr__(self) -> str:
        name = type(self).__name__
        incarnation = self._incarnation
        if self._is_shut_down:
            return f"{name}(shut down)"
        if incarnation is None:
            return f"{name}(unconfigured)"
        spec = incarnation.spec
        place = f"rank {spec.rank} of {spec.world_size}"
        if incarnation.aborted:
            return f"{name}({place}, aborted: {incarnation.error})"
        if not incarnation.formed:
            return f"{name}({place}, forming)"
        state = "failed" if incarnation.error else "ready"
        pid = None if incarnation.child is None else incarnation.child.pid
        return f"{name}({place}, {state}, in process {pid}, {incarnation.in_flight} in flight)"

    def __del__(self) -> None:
        incarnation = getattr(self, "_incarnation", None)
        if incarnation is not None:
            incarnation.drop()

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Form a new group in a new child; see the base class. With one rank no store is contacted."""
        check_place(rank, world_size)
        if world_size > 1:
            parse_store_addr(store_addr)
        new = Incarnation(
            Spec(
                store_addr=store_addr,
                replica_id=replica_id,
                rank=rank,
                world_size=world_size,
                timeout=self._timeout,
                inner=self.inner,
                arguments=self._inner_arguments(),
                label=self.label,
                on_device=self.on_device,
            ),
            self._pool,
        )
        with self._lock:
            if self._is_shut_down:
                raise UsageError(f"configure() after shutdown(): make a new {type(self).__name__}")
            old, self._incarnation = self._incarnation, new
            self._update_registration(world_size)
        if old is not None:
            old.abort(CollectiveError(f"{old.who()} has ended: configure() was called again"))
        new.form()

    def abort(self) -> None:
        """Kill the child (a few milliseconds); without one, nothing happens."""
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.abort(CollectiveError(f"abort() was called on {incarnation.who()}; configure() it again"))

    def shutdown(self) -> None:
        """End it for good, and wait for the child to be gone."""
        self.unregister()
        with self._lock:
            self._is_shut_down = True
            old, self._incarnation = self._incarnation, None
        if old is not None:
            old.abort(CollectiveError(f"{old.who()} has ended: shutdown() was called"))
            old.wait_gone(SHUTDOWN_WAIT_S)
        self._pool.close()

    def errored(self) -> Exception | None:
        """Return the first error of the current group, found by waiting or not; never blocks."""
        incarnation = self._incarnation
        return None if incarnation is None else incarnation.first_error()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next configure and of collectives launched from now on."""
        if timeout <= timedelta(0):
            raise ConfigError(f"timeout={timeout}: expected more than zero")
        self._timeout = timeout
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.set_timeout(timeout)

    def connection_fds(self) -> list[int]:
        """Return this process's own descriptors of the child's connections, which the child sent when it had formed."""
        incarnation = self._incarnation
        return [] if incarnation is None else incarnation.connection_fds()

    @property
    def carries_cpu_memory(self) -> bool:
        """Whether the inner group works on tensors in CPU memory."""
        return not self.on_device

    def sibling(self) -> ProcessGroupBaby:
        """Return an unconfigured group of the same kind and settings."""
        return type(self)(timeout=self._timeout, **self._arguments)

    def getBackendName(self) -> str:
        """Return the name."""
        return self.backend_name

    def size(self) -> int:
        """Return the number of ranks; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.world_size

    def rank(self) -> int:
        """Return this rank; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.rank

    def num_active_work(self) -> int:
        """Return how many collectives are in flight."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.in_flight

    def _inner_arguments(self) -> dict[str, Any]:
        """Return what the inner group is constructed with, besides the timeout."""
        return self._arguments

    def _launch(self, name: str, *arguments: Any) -> Work:
        incarnation = self._incarnation
        if incarnation is None:
            raise UsageError(f"{self!r}: configure() it first")
        if not incarnation.formed and not incarnation.aborted:
            raise UsageError(f"{self!r}: configure() has not returned yet")
        return incarnation.launch(name, arguments)
