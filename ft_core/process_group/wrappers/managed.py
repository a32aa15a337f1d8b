"""`ManagedProcessGroup`: the replicas of a Manager, as a process group that torch code can be given.

Its size is the number of participants, its allreduce is the Manager's (which waits for the quorum, records errors for
the commit and leaves out what does not count), with the operation that the caller names: a sum is a sum. Other
collectives are refused: the Manager has no rule for what they mean when a replica fails. The Manager owns and
configures the real group; this one only stands for it.

What torch is told of it (its backend, its kind of device, whether a wait blocks the host) is that of the Manager's
group, from when there is one: a Manager that chooses it by the model has none before the first model; till then it is
Gloo's.

Threads: those of `manager.allreduce`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import Work

from ft_core.errors import NotAvailableError, UsageError
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.done_work import NO_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


class ManagerHooks(Protocol):
    """What it needs of a Manager's hooks."""

    @property
    def process_group(self) -> ProcessGroup | None:
        """Return the group of the gradients; None: it is not chosen yet."""

    def check_allreduce(self, name: str, tensors: Sequence[torch.Tensor], reduce_op: Any) -> None:
        """Raise ConfigError if one of the tensors cannot be reduced so: where it is, or what is in it."""


class AllreduceManager(Protocol):
    """What a ManagedProcessGroup needs of a Manager."""

    @property
    def hooks(self) -> ManagerHooks:
        """Return what it offers to wrappers of ours."""

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any) -> Any:
        """Start the fault-tolerant allreduce of `tensor`, in place; returns a Work or a Future.

        Raises ConfigError for an operation that has no rule, or none for this dtype, and for a tensor on a device that
        the Manager's group does not carry.
        """

    def num_participants(self) -> int:
        """Return how many replicas count in this step."""

    def participating_rank(self) -> int | None:
        """Return this replica's place among them, or None if it does not count."""

    def errored(self) -> Any:
        """Return this step's error, or None."""


class ManagedProcessGroup(ProcessGroup):
    """The replicas of `manager`."""

    def __init__(self, manager: AllreduceManager) -> None:
        super().__init__()
        self._manager = manager

    def __repr__(self) -> str:
        return f"ManagedProcessGroup({self._manager!r})"

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:  # noqa: ARG002
        """Refuse: the Manager configures the group behind it."""
        raise UsageError("a ManagedProcessGroup follows its Manager's quorum; it cannot be configured")

    def abort(self) -> None:
        """Refuse: use the Manager."""
        raise UsageError("a ManagedProcessGroup cannot be aborted: manager.report_error() discards the step")

    def errored(self) -> Exception | None:
        """Return the Manager's error in this step, or None."""
        error = self._manager.errored()
        return error if error is None or isinstance(error, Exception) else RuntimeError(str(error))

    def set_timeout(self, timeout: timedelta) -> None:  # noqa: ARG002
        """Refuse: the Manager's settings hold."""
        raise UsageError("a ManagedProcessGroup has its Manager's timeouts: give them to the Manager")

    def shutdown(self) -> None:
        """Unregister it; the Manager stays as it is."""
        self.unregister()

    def sibling(self) -> ManagedProcessGroup:
        """Return another one of the same Manager."""
        return ManagedProcessGroup(self._manager)

    def getBackendName(self) -> str:
        """Return the name."""
        return "ft-managed"

    @property
    def blocks_host(self) -> bool:
        """Whether a wait blocks the host until tensors on the device of the Manager's group are there."""
        group = self._manager.hooks.process_group
        return super().blocks_host if group is None else group.blocks_host

    @property
    def torch_backend(self) -> str:
        """The kind of the Manager's group."""
        group = self._manager.hooks.process_group
        return super().torch_backend if group is None else group.torch_backend

    @property
    def torch_device_type(self) -> str:
        """The kind of device that the Manager's group carries."""
        group = self._manager.hooks.process_group
        return super().torch_device_type if group is None else group.torch_device_type

    def size(self) -> int:
        """Return the number of participants."""
        return self._manager.num_participants()

    def rank(self) -> int:
        """Return this replica's place among the participants (0 while it is none)."""
        return self._manager.participating_rank() or 0

    def _launch(self, name: str, *arguments: Any) -> Work:
        if name not in ("allreduce", "allreduce_coalesced"):
            raise NotAvailableError(
                f"{name} over the replicas needs a rule for replicas that fail; only allreduce has one"
            )
        tensors, opts = arguments
        op = opts.reduceOp
        # All of them before the first is launched: who raises after that leaves the others in a collective.
        self._manager.hooks.check_allreduce(name, tensors, op)
        return _ManagedWork(tensors, [self._manager.allreduce(tensor, reduce_op=op) for tensor in tensors])


class _ManagedWork(Work):
    """The Manager's allreduces of one call, as one work."""

    def __init__(self, tensors: Any, handles: list[Any]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._handles = handles

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002 - the Manager's timeouts hold
        for handle in self._handles:
            handle.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [handle.get_future() if hasattr(handle, "get_future") else handle for handle in self._handles]
        return torch.futures.collect_all(futures).then(lambda _all: self._tensors)

    def result(self) -> Any:
        return self._tensors

    def is_completed(self) -> bool:
        return all(h.is_completed() if hasattr(h, "is_completed") else h.done() for h in self._handles)

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()
