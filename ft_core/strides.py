"""The order in which a tensor's elements lie in memory. Pure; nothing is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Strided(Protocol):
    """A tensor, or what stands for a part of one."""

    @property
    def shape(self) -> torch.Size:
        """Its size in each dimension."""
        ...

    def stride(self) -> tuple[int, ...]:
        """How far elements that follow each other in a dimension are apart in memory, in elements."""
        ...

    def is_contiguous(self) -> bool:
        """Whether it lies row by row."""
        ...


def dense_strides(tensor: Strided) -> tuple[int, ...] | None:
    """Strides of a tensor that fills its memory in another order than row by row (channels_last); else None."""
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def fills_its_memory(tensor: Strided) -> bool:
    """Whether its elements lie in memory without gaps, in whatever order."""
    return tensor.is_contiguous() or dense_strides(tensor) is not None
