"""The operations of `Manager.allreduce`, and what a member that has nothing to add puts into each.

That is the neutral element of the operation in the tensor's dtype: the result is then the reduction over those who
take part, on every member. Threads: any; there is no state.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OF_COMPLEX = ("SUM", "AVG")
_OF_BITS = ("BAND", "BOR", "BXOR")


def name_of(op: ReduceOp.RedOpType, dtype: torch.dtype) -> str:
    """Its name.

    Raises:
        ConfigError: there is no rule for this operation, or it is not defined for the dtype (as in torch).
    """
    name = next((name for name in _NAMES if op == getattr(ReduceOp, name)), None)
    if name is None:
        raise ConfigError(f"reduce_op={op}: there is no rule for members that do not take part; use one of {_NAMES}")
    real = not dtype.is_complex
    if name == "AVG" and dtype.itemsize == 1 and dtype.is_floating_point:
        raise ConfigError(f"reduce_op=AVG: torch does not compute in {dtype}; convert the tensor to a wider type")
    if name == "AVG" and real and not dtype.is_floating_point:
        raise ConfigError(f"reduce_op=AVG needs a floating point tensor, got {dtype}; use SUM")
    if not real and name not in _OF_COMPLEX:
        raise ConfigError(f"reduce_op={name} is not defined for {dtype}; use SUM or AVG, or torch.view_as_real")
    if dtype.is_floating_point and name in _OF_BITS:
        raise ConfigError(f"reduce_op={name} is not defined for {dtype}: it needs integers or bool")
    return name


def in_place(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The mode in which a tensor of the script's may be written: its own part is scaled, as a collective writes it.

    Torch refuses to write to a parameter where a history is kept, and elsewhere than in inference mode to what was
    made there (a validation's loss).
    """
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


@functools.cache
def neutral_element(name: str, dtype: torch.dtype) -> float | int | bool:
    """The e with op(e, x) = x for every x of the dtype."""
    if name in ("MIN", "MAX", "BAND"):
        return _neutral_of_order[name](dtype)
    return 1 if name == "PRODUCT" else 0


def _least(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _all_bits(dtype: torch.dtype) -> int | bool:
    if dtype == torch.bool:
        return True
    return -1 if dtype.is_signed else torch.iinfo(dtype).max


_neutral_of_order: dict[str, Callable[[torch.dtype], float | int | bool]] = {
    "MIN": _greatest, "MAX": _least, "BAND": _all_bits,
}  # fmt: skip
