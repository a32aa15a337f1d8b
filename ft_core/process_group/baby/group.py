"""`ProcessGroupBaby`: a process group that runs in a child process; its kinds are in `kinds.py`.

How it works: an incarnation is one formed group in a child of its own, which waited ready (children.py); `abort` kills
it. What a backend cannot be trusted with, ending a group that hangs, is done by the kernel.

Invariants: as of `ReformableGroup`. Mistakes in a collective's arguments are raised by its work, where the inner group
finds them. The time that a collective may take counts from its launch, for messages (send, recv) too. `shutdown` waits
for the child to be gone.

Threads: as of `ReformableGroup`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.process_group.baby import children as processes
from ft_core.process_group.baby.incarnation import Incarnation, Inner
from ft_core.process_group.baby.segments import SegmentPool
from ft_core.process_group.reformable import DEFAULT_TIMEOUT, ReformableGroup

if TYPE_CHECKING:
    from torch.distributed import Work

    from ft_core.process_group.spec import Spec

SHUTDOWN_WAIT_S = 10.0
"""How long `shutdown` waits for the killed child to be gone; it takes milliseconds."""


class ProcessGroupBaby(ReformableGroup):
    """A group of `inner`'s kind in a child process. `timeout`: of forming, and of each collective."""

    inner = ""
    """Name of the class in ft_core.process_group that runs in the child."""
    backend_name = ""
    on_device = False
    """Whether the child works on device memory, and on nothing else."""
    _incarnation: Incarnation | None

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT, **arguments: Any) -> None:
        super().__init__(timeout)
        self._arguments = arguments
        self._pool = SegmentPool()
        processes.children.prepare()

    def _incarnate(self, spec: Spec, before: Incarnation | None) -> Incarnation:
        return Incarnation(spec, Inner(self.inner, self._inner_arguments(), self.on_device), self._pool, before)

    def _retire(self, incarnation: Incarnation) -> None:
        incarnation.drop()

    def _state_of(self, incarnation: Incarnation) -> str:
        if incarnation.aborted:
            return f"aborted: {incarnation.error}"
        if not incarnation.formed:
            return "forming"
        state = "failed" if incarnation.error else "ready"
        pid = None if incarnation.child is None else incarnation.child.pid
        return f"{state}, in process {pid}, {incarnation.in_flight} in flight"

    def _shut(self, last: Incarnation | None) -> None:
        if last is not None:
            last.wait_gone(SHUTDOWN_WAIT_S)
        self._pool.close()

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

    def num_active_work(self) -> int:
        """Return how many collectives are in flight."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.in_flight

    def _inner_arguments(self) -> dict[str, Any]:
        """Return what the inner group is constructed with, besides the timeout."""
        return self._arguments

    def _launch(self, name: str, *arguments: Any) -> Work:
        incarnation: Incarnation = self._current()
        return incarnation.launch(name, arguments)
