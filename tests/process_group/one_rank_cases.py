"""Every collective that a group launches, for one rank: to be run over two groups and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp

from ft_core.process_group.device.tensors import tensors_of

Make = Callable[..., torch.Tensor]
"""A new tensor of this shape with values of its own, the same in each run; `zeros=True`: with none."""
Arguments = tuple[Any, ...]

REDUCTIONS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
FACTOR = 0.1
"""Not a number of any of these types."""


def with_op(kind: Any, op: Any) -> Any:
    opts = kind()
    opts.reduceOp = op
    return opts


def multiplying(factor: Any = FACTOR) -> Any:
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]  # not in torch's stub


REDUCING: dict[str, Callable[[Make, Any], Arguments]] = {
    "allreduce": lambda make, op: ([make(2, 3)], with_op(AllreduceOptions, op)),
    "allreduce_coalesced": lambda make, op: ([make(3), make(2, 2)], with_op(AllreduceCoalescedOptions, op)),
    "reduce": lambda make, op: ([make(5)], with_op(ReduceOptions, op)),
    "reduce_scatter": lambda make, op: ([make(2, 3, zeros=True)], [[make(2, 3)]], with_op(ReduceScatterOptions, op)),
    "_reduce_scatter_base": lambda make, op: (make(6, zeros=True), make(6), with_op(ReduceScatterOptions, op)),
    "reduce_scatter_tensor_coalesced": lambda make, op: (
        [make(2, zeros=True), make(3, zeros=True)],
        [make(2), make(3)],
        with_op(ReduceScatterOptions, op),
    ),
}
OTHERS: dict[str, tuple[str, Callable[[Make], Arguments]]] = {
    "broadcast": ("broadcast", lambda make: ([make(2, 3)], BroadcastOptions())),
    "allgather": ("allgather", lambda make: ([[make(4, zeros=True)]], [make(4)], AllgatherOptions())),
    "base": ("_allgather_base", lambda make: (make(6, zeros=True), make(6), AllgatherOptions())),
    "into": (
        "allgather_into_tensor_coalesced",
        lambda make: ([make(2, zeros=True), make(1, zeros=True)], [make(2), make(1)], AllgatherOptions()),
    ),
    "alltoall": ("alltoall", lambda make: ([make(3, zeros=True)], [make(3)], AllToAllOptions())),
    "alltoall_base": ("alltoall_base", lambda make: (make(3, zeros=True), make(3), [], [], AllToAllOptions())),
    "splits": ("alltoall_base", lambda make: (make(3, 2, zeros=True), make(3, 2), [3], [3], AllToAllOptions())),
    "gather": ("gather", lambda make: ([[make(2, zeros=True)]], [make(2)], GatherOptions())),
    "scatter": ("scatter", lambda make: ([make(2, zeros=True)], [[make(2)]], ScatterOptions())),
    "nothing": ("allreduce", lambda make: ([make(0)], AllreduceOptions())),
    "barrier": ("barrier", lambda _: (BarrierOptions(),)),
}


def values(dtype: torch.dtype, device: torch.device) -> Make:
    """What makes tensors of this type: of both signs, tiny, huge and not finite where the type has such."""
    generator = torch.Generator().manual_seed(7)

    def make(*shape: int, zeros: bool = False) -> torch.Tensor:
        if zeros:
            return torch.zeros(shape, dtype=dtype, device=device)
        made = (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).to(dtype)
        if dtype.is_floating_point and made.numel() > 3:
            tiny = torch.finfo(dtype).smallest_normal / 4
            made.view(-1)[:4] = torch.tensor([float("-inf"), -0.0, torch.finfo(dtype).max, tiny], dtype=dtype)
        return made.to(device)

    return make


def all_of(arguments: Arguments) -> list[torch.Tensor]:
    """Every tensor, what is read as well as what is written."""
    return list(tensors_of(arguments))


def bits(tensors: list[torch.Tensor]) -> list[list[int]]:
    """What lies in their memory, in the order of their elements."""
    return [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]
