"""Which tensors Gloo takes for what they are, checked before anything is launched.

Gloo is given the address of a tensor's first element and the number of them. What lies otherwise in memory (every
second element of a tensor, one element that is shown many times) would be reduced with its neighbours, or with memory
that is not the tensor's, without an error; a type that Gloo does not know fails on Gloo's own thread, and the group
with it. Both are mistakes of the caller's, and the group is as good as before.

Pure; threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ft_core.errors import ConfigError
from ft_core.strides import fills_its_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.int32}
    | {torch.int64}
)
_IN_PLACE = frozenset({"allreduce", "broadcast", "reduce", "reduce_scatter", "recv", "recv_anysource", "send"})
_BOTH = frozenset({"scatter", "alltoall_base"})
"""Collectives in which torch hands the memory of the first argument to Gloo, or of the first two. Others it copies."""
_ANY_DTYPE = frozenset({"send", "recv", "recv_anysource", "alltoall"})
"""They carry bytes."""


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError unless a tensor's elements are what lies in its memory, without gaps, in whatever order."""
    if tensor.layout != torch.strided:
        return
    if not fills_its_memory(tensor):
        raise ConfigError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous in "
            f"memory, and its neighbours there would be taken for its elements: use tensor.contiguous(), and copy back"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(f"{name}: a tensor is a view that is not computed yet: call its resolve_conj().resolve_neg()")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ConfigError unless Gloo knows the type."""
    if dtype not in DTYPES:
        known = ", ".join(sorted(str(known).removeprefix("torch.") for known in DTYPES))
        raise ConfigError(f"{name}: Gloo carries no tensors of {dtype}; convert it to one of {known}")


def check_call(name: str, arguments: Sequence[Any]) -> None:
    """Raise ConfigError for a collective that Gloo would carry out on something else than its tensors."""
    used = 2 if name in _BOTH else 1 if name in _IN_PLACE else 0
    for argument in arguments[:2]:
        for tensor in _tensors_of(argument):
            if name not in _ANY_DTYPE:
                check_dtype(name, tensor.dtype)
            if used > 0:
                check_memory(name, tensor)
        used -= 1


def _tensors_of(argument: Any) -> Sequence[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return (argument,)
    if not isinstance(argument, (list, tuple)):
        return ()
    return [tensor for part in argument for tensor in _tensors_of(part)]
