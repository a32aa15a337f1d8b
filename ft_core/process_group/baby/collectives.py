"""What each collective reads and writes, and how a call becomes plain values that another process can repeat.

How it works. `flatten` takes a call's arguments apart: each tensor is replaced by its number (`Slot`), options become
their fields. `rebuild` is the reverse, with other tensors in their places. Which tensors are read and which are written
follows from the collective's name and the argument's position (ROLES).

Pure: no process, memory or thread. Invariant: `rebuild(*flatten(call))` is the same call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

from ft_core.errors import NotAvailableError


class Role(enum.Flag):
    """What a collective does with a tensor."""

    READ = enum.auto()
    WRITTEN = enum.auto()
    BOTH = READ | WRITTEN


_IN_PLACE = (Role.BOTH,)
_FROM_TO = (Role.WRITTEN, Role.READ)

ROLES: dict[str, tuple[Role, ...]] = {
    "allreduce": _IN_PLACE,
    "allreduce_coalesced": _IN_PLACE,
    "broadcast": _IN_PLACE,
    "reduce": _IN_PLACE,
    "allgather": _FROM_TO,
    "allgather_coalesced": _FROM_TO,
    "allgather_into_tensor_coalesced": _FROM_TO,
    "_allgather_base": _FROM_TO,
    "alltoall": _FROM_TO,
    "alltoall_base": _FROM_TO,
    "gather": _FROM_TO,
    "scatter": _FROM_TO,
    "reduce_scatter": _FROM_TO,
    "reduce_scatter_tensor_coalesced": _FROM_TO,
    "_reduce_scatter_base": _FROM_TO,
    "send": (Role.READ,),
    "recv": (Role.WRITTEN,),
    "recv_anysource": (Role.WRITTEN,),
    "barrier": (),
    "monitored_barrier": (),
}
"""The roles of the leading arguments, which hold tensors; what follows them holds none. What is written is written
whole, so that only what is read has to be there before."""

_OPTIONS: tuple[type, ...] = (
    c10d.AllgatherOptions,
    c10d.AllreduceCoalescedOptions,
    c10d.AllreduceOptions,
    c10d.AllToAllOptions,
    c10d.BarrierOptions,
    c10d.BroadcastOptions,
    c10d.GatherOptions,
    c10d.ReduceOptions,
    c10d.ReduceScatterOptions,
    c10d.ScatterOptions,
)
_FIELDS = ("reduceOp", "rootRank", "rootTensor", "timeout", "asyncOp", "device", "device_ids", "sparseIndices")


@dataclass(frozen=True)
class Slot:
    """Stands for the tensor of this number."""

    number: int


@dataclass(frozen=True)
class Options:
    """Stands for one of torch's option objects, which cannot be pickled."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One collective, as plain values."""

    name: str
    arguments: tuple[Any, ...]
    roles: tuple[Role, ...]
    """Of each tensor, by its number."""


def flatten(name: str, arguments: Sequence[Any]) -> tuple[Call, list[torch.Tensor]]:
    """Return a call as plain values, and its tensors by their numbers. NotAvailableError for an unknown collective."""
    if name not in ROLES:
        raise NotAvailableError(f"{name}: a group in a child process has no such collective")
    by_position = ROLES[name]
    tensors: list[torch.Tensor] = []
    roles: list[Role] = []

    def plain(value: Any, role: Role) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            roles.append(role)
            return Slot(len(tensors) - 1)
        if isinstance(value, (list, tuple)):
            return [plain(part, role) for part in value]
        if isinstance(value, _OPTIONS):
            return Options(
                type(value).__name__, {name: getattr(value, name) for name in _FIELDS if hasattr(value, name)}
            )
        return value

    flat = tuple(
        plain(argument, by_position[at] if at < len(by_position) else Role.BOTH)
        for at, argument in enumerate(arguments)
    )
    return Call(name, flat, tuple(roles)), tensors


def rebuild(call: Call, tensor: Callable[[int], torch.Tensor]) -> tuple[Any, ...]:
    """Return the call's arguments with `tensor(number)` in each slot."""

    def whole(value: Any) -> Any:
        if isinstance(value, Slot):
            return tensor(value.number)
        if isinstance(value, list):
            return [whole(part) for part in value]
        if isinstance(value, Options):
            options = getattr(c10d, value.kind)()
            for name, field in value.fields.items():
                setattr(options, name, field)
            return options
        return value

    return tuple(whole(argument) for argument in call.arguments)


def outputs(name: str, arguments: Sequence[Any]) -> list[Any]:
    """Return what the collective's work gives as its result, in the form in which torch's own works give it."""
    if not ROLES[name] or not arguments:
        return []
    first = arguments[0]
    if isinstance(first, torch.Tensor):
        return [first]
    first = list(first)
    if len(first) == 1 and isinstance(first[0], (list, tuple)):
        return list(first[0])
    return first


def longest_timeout_s(arguments: Sequence[Any], default_s: float) -> float:
    """Return how long the collective may take: the timeout in its options, or else `default_s`."""
    for argument in arguments:
        timeout = getattr(argument, "timeout", None)
        if isinstance(argument, _OPTIONS) and timeout is not None and timeout.total_seconds() > 0:
            return max(default_s, float(timeout.total_seconds()))
    return default_s
