"""`ProcessGroupGloo`: the data plane over Gloo, re-formed and aborted in milliseconds.

How it works: it holds one `Incarnation` (one formed Gloo group) at a time. `configure` makes a new one, ends the old
one and hands that to the reaper; `abort` ends the current one. A collective is one call on the incarnation's backend
plus a `GlooWork` around the result.

Invariants: the newest `configure`, `abort` or `shutdown` wins: an earlier configure that is still forming fails as
soon as a later call comes, so its thread can simply be given up. After an abort every collective raises until a new
configure. Errors of an earlier incarnation never show in a later one.

Threads: collectives from one thread at a time; everything else from any. `_lock` guards which incarnation is current.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import ReduceOp, Work

from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group import reaper as reaping
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.gloo.incarnation import Incarnation, Spec
from ft_core.process_group.gloo.work import GlooWork
from ft_core.process_group.store_pool import parse_store_addr

DEFAULT_TIMEOUT = timedelta(seconds=60)

# Works of which c10d only says that they have ended after somebody waited for them.
_UNTRACKED = frozenset(
    {"send", "recv", "recv_anysource", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"}
)
_ONLY_THROUGH_DISPATCHER = frozenset({"allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"})
_REDUCING = frozenset(
    {
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
        "_reduce_scatter_base",
    }
)


class ProcessGroupGloo(ProcessGroup):
    """A process group over Gloo that can be re-formed and aborted.

    `timeout`: of forming, and of each collective. `hostname` (a name or address of this machine) or `interface` (such
    as "eth0") choose where to listen; by default FT_HOSTNAME or FT_INTERFACE, else the address from which this
    machine reaches the store. Raises ConfigError if both are given.
    """

    def __init__(
        self,
        timeout: timedelta = DEFAULT_TIMEOUT,
        hostname: str | None = None,
        interface: str | None = None,
    ) -> None:
        super().__init__()
        _check_timeout(timeout)
        if hostname and interface:
            raise ConfigError(f"hostname={hostname!r} and interface={interface!r}: give one of them, not both")
        if not hostname and not interface:
            interface = os.environ.get("FT_INTERFACE") or None
            hostname = None if interface else os.environ.get("FT_HOSTNAME") or None
        self._timeout = timeout
        self._hostname = hostname
        self._interface = interface
        self._lock = threading.Lock()
        self._incarnation: Incarnation | None = None
        self._is_shut_down = False

    def __repr__(self) -> str:
        incarnation = self._incarnation
        if self._is_shut_down:
            return "ProcessGroupGloo(shut down)"
        if incarnation is None:
            return "ProcessGroupGloo(unconfigured)"
        spec = incarnation.spec
        place = f"rank {spec.rank} of {spec.world_size}"
        if incarnation.aborted:
            return f"ProcessGroupGloo({place}, aborted: {incarnation.error})"
        if incarnation.backend is None:
            return f"ProcessGroupGloo({place}, forming)"
        state = "failed" if incarnation.error else "ready"
        at = incarnation.connections.listening
        return f"ProcessGroupGloo({place}, {state}, at {at}, {incarnation.in_flight} in flight)"

    def __del__(self) -> None:
        # Only hands it over: destroying happens on the reaper's thread, never here.
        incarnation = getattr(self, "_incarnation", None)
        reaper = getattr(reaping, "gloo", None)  # None while an ending interpreter takes its modules apart
        if incarnation is not None and reaper is not None:
            reaper.retire(incarnation)

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Form a new group; see the base class. With one rank no store is contacted."""
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
        if world_size > 1:
            parse_store_addr(store_addr)
        new = Incarnation(
            Spec(
                store_addr=store_addr,
                replica_id=replica_id,
                rank=rank,
                world_size=world_size,
                timeout=self._timeout,
                hostname=self._hostname,
                interface=self._interface,
            )
        )
        with self._lock:
            if self._is_shut_down:
                raise UsageError("configure() after shutdown(): make a new ProcessGroupGloo")
            old, self._incarnation = self._incarnation, new
            self._update_registration(world_size)
        reaping.gloo.start()
        if old is not None:
            _end(old, "configure() was called again")
        new.form()

    def abort(self) -> None:
        """End the current group (a few milliseconds); without one, nothing happens."""
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.abort(CollectiveError(f"abort() was called on {incarnation._who()}; configure() it again"))

    def shutdown(self) -> None:
        """End it for good; destroying the group goes on in the background."""
        self.unregister()
        with self._lock:
            self._is_shut_down = True
            old, self._incarnation = self._incarnation, None
        if old is not None:
            _end(old, "shutdown() was called")

    def errored(self) -> Exception | None:
        """Return the first error of the current group, found by waiting or not; never blocks."""
        incarnation = self._incarnation
        return None if incarnation is None else incarnation.first_error()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next configure and of collectives launched from now on."""
        _check_timeout(timeout)
        self._timeout = timeout
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.set_timeout(timeout)

    def connection_fds(self) -> list[int]:
        """Return the descriptors of the connections that the current group was formed with."""
        incarnation = self._incarnation
        return [] if incarnation is None or incarnation.aborted else incarnation.connections.open_fds()

    def sibling(self) -> ProcessGroupGloo:
        """Return an unconfigured group with the same timeout and place to listen."""
        return ProcessGroupGloo(timeout=self._timeout, hostname=self._hostname, interface=self._interface)

    def getBackendName(self) -> str:
        """Return the name."""
        return "ft-gloo"

    def size(self) -> int:
        """Return the number of ranks; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.world_size

    def rank(self) -> int:
        """Return this rank; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.rank

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks called it; rank 0's error names a rank that did not."""
        incarnation, backend = self._current()
        try:
            backend.monitored_barrier(timeout or self._timeout, wait_all_ranks)
        except RuntimeError as error:
            raise incarnation.failed("monitored_barrier", error) from error

    def _launch(self, name: str, *arguments: Any) -> Work:
        incarnation, target = self._current()
        if name in _REDUCING:
            _check_operation(arguments[-1].reduceOp)
        if name in _ONLY_THROUGH_DISPATCHER:
            target = incarnation.dispatcher()
        try:
            inner = getattr(target, name)(*arguments)
        except RuntimeError as error:
            if incarnation.aborted:
                raise incarnation.refusal() from error
            if "ProcessGroupGloo::" in str(error):
                raise  # Gloo's own check of the arguments: the caller's mistake, the group is as good as before
            raise incarnation.failed(name, error) from error
        finally:
            del target  # an error's traceback must not keep the backend alive for the reaper
        tracked = name not in _UNTRACKED
        if tracked:
            incarnation.track(inner)
        return GlooWork(name, inner, incarnation, tracked)

    def _current(self) -> tuple[Incarnation, Any]:
        incarnation = self._incarnation
        if incarnation is None:
            raise UsageError(f"{self!r}: configure() it first")
        backend = incarnation.backend
        if backend is None:
            if not incarnation.aborted:
                raise UsageError(f"{self!r}: configure() has not returned yet")
            raise incarnation.refusal()
        return incarnation, backend


def _end(incarnation: Incarnation, why: str) -> None:
    incarnation.abort(CollectiveError(f"{incarnation._who()} has ended: {why}"))
    reaping.gloo.retire(incarnation)


def _check_timeout(timeout: timedelta) -> None:
    if timeout <= timedelta(0):
        raise ConfigError(f"timeout={timeout}: expected more than zero")


def _check_operation(operation: Any) -> None:
    if operation == ReduceOp.AVG:
        raise ConfigError("ReduceOp.AVG: Gloo has no average; use ReduceOp.SUM and divide by size()")
