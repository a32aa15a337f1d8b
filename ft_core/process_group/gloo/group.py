"""`ProcessGroupGloo`: the data plane over Gloo, re-formed and aborted in milliseconds.

How it works: an incarnation is one Gloo group (`incarnation.py`); the reaper destroys it once it has ended. A
collective is one call on the incarnation's backend plus a `GlooWork` around the result.

Invariants and threads: as of `ReformableGroup`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from ft_core.errors import ConfigError, NotAvailableError
from ft_core.process_group import reaper as reaping
from ft_core.process_group.gloo.incarnation import Incarnation
from ft_core.process_group.gloo.tensors import check_call
from ft_core.process_group.gloo.work import GlooWork
from ft_core.process_group.messages import first_line
from ft_core.process_group.reformable import DEFAULT_TIMEOUT, ReformableGroup

if TYPE_CHECKING:
    from torch.distributed import Work

    from ft_core.process_group.spec import Spec

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


class ProcessGroupGloo(ReformableGroup):
    """A process group over Gloo that can be re-formed and aborted.

    `timeout`: of forming, and of each collective. `hostname` (a name or address of this machine) or `interface` (such
    as "eth0") choose where to listen; by default FT_HOSTNAME or FT_INTERFACE, else the address from which this
    machine reaches the store. Raises ConfigError if both are given.
    """

    what = "Gloo"
    _incarnation: Incarnation | None

    def __init__(
        self,
        timeout: timedelta = DEFAULT_TIMEOUT,
        hostname: str | None = None,
        interface: str | None = None,
    ) -> None:
        super().__init__(timeout)
        self._hostname, self._interface = where_to_listen(hostname, interface)

    def _incarnate(self, spec: Spec, before: Incarnation | None) -> Incarnation:  # noqa: ARG002 - each has its own port
        return Incarnation(spec, self._hostname, self._interface)

    def _retire(self, incarnation: Incarnation) -> None:
        reaper = getattr(reaping, "gloo", None)  # None while an ending interpreter takes its modules apart
        if reaper is not None:
            reaper.retire(incarnation)

    def _state_of(self, incarnation: Incarnation) -> str:
        if incarnation.aborted:
            return f"aborted: {incarnation.error}"
        if incarnation.backend is None:
            return "forming"
        state = "failed" if incarnation.error else "ready"
        return f"{state}, at {incarnation.connections.listening}, {incarnation.in_flight} in flight"

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

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks called it; rank 0's error names a rank that did not."""
        incarnation, backend = self._backend()
        try:
            backend.monitored_barrier(timeout or self._timeout, wait_all_ranks)
        except RuntimeError as error:
            raise incarnation.failed("monitored_barrier", error) from error

    def _launch(self, name: str, *arguments: Any) -> Work:
        incarnation, target = self._backend()
        if name in _REDUCING:
            check_operation(arguments[-1].reduceOp)
        check_call(name, arguments)
        if name in _ONLY_THROUGH_DISPATCHER:
            target = incarnation.dispatcher()
        try:
            inner = getattr(target, name)(*arguments)
        except RuntimeError as error:
            if incarnation.aborted:
                raise incarnation.refusal() from error
            if "ProcessGroupGloo::" in str(error):
                raise  # Gloo's own check of the arguments: the caller's mistake, the group is as good as before
            if "does not support" in str(error):  # alltoall, before torch 2.12
                raise NotAvailableError(f"{name}: {first_line(error)} (torch {torch.__version__})") from error
            raise incarnation.failed(name, error) from error
        finally:
            del target  # an error's traceback must not keep the backend alive for the reaper
        tracked = name not in _UNTRACKED
        if tracked:
            incarnation.track(inner)
        return GlooWork(name, inner, incarnation, None if tracked else self._timeout)

    def _backend(self) -> tuple[Incarnation, Any]:
        incarnation: Incarnation = self._current()
        backend = incarnation.backend
        if backend is None:
            raise incarnation.refusal()
        return incarnation, backend


def where_to_listen(hostname: str | None, interface: str | None) -> tuple[str | None, str | None]:
    """Return the host name, or the interface, at which a group listens: those given, else the environment's."""
    if hostname and interface:
        raise ConfigError(f"hostname={hostname!r} and interface={interface!r}: give one of them, not both")
    if not hostname and not interface:
        interface = os.environ.get("FT_INTERFACE") or None
        hostname = None if interface else os.environ.get("FT_HOSTNAME") or None
    return hostname, interface


def check_operation(operation: Any) -> None:
    """Raise ConfigError for a reduction that Gloo does not have."""
    if operation == ReduceOp.AVG:
        raise ConfigError("ReduceOp.AVG: Gloo has no average; use ReduceOp.SUM and divide by size()")
