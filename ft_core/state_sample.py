"""A digest of a part of the parameters at each step, another part each time: finds replicas that silently differ.

How it works. All parameters lie one after another in a row of bytes; step n looks at one window of it, the next step at
the next. A full pass takes `steps` steps, less where that would make windows shorter than MIN_BYTES. The digest rides
in the fence, where its sum shows whether all members have the same (`fence`). It is taken when a step opens: only then
is the state surely that of the last commit, because a script may change parameters within a step (SAM).

Invariants: which bytes a step looks at depends on the layout and the number of the step only, so it is the same on
all members. What is not in the memory of the CPU, or has holes between its elements, is left out (on all members).
Threads: the training thread.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from typing import TYPE_CHECKING

from ft_core.checkpointing.memory import checksum
from ft_core.flat import dense_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MIN_BYTES = 16 << 10
"""A window of this size costs about two microseconds."""


class StateSample:
    """What is compared of the parameters of all wrapped modules.

    Args:
        parameters: in an order that is the same on all replicas.
        steps: within how many steps every byte is looked at, at the latest.
    """

    def __init__(self, parameters: Sequence[Tensor], steps: int) -> None:
        self._parameters = [p for p in parameters if p.device.type == "cpu" and _fills_its_memory(p)]
        sizes = (parameter.numel() * parameter.element_size() for parameter in self._parameters)
        self._starts = [0, *itertools.accumulate(sizes)]
        self._total = self._starts[-1]
        self._window = min(self._total, max(MIN_BYTES, -(-self._total // max(1, steps))))

    def __repr__(self) -> str:
        return f"StateSample({self._window} of {self._total} bytes each step)"

    def take(self, step: int) -> int | None:
        """Digest, 32 bits, of the window of `step`; None if there is nothing to compare."""
        if not self._total:
            return None
        digest, start, left = step, step * self._window % self._total, self._window
        while left:
            index = bisect.bisect_right(self._starts, start) - 1
            end = min(self._starts[index + 1], start + left)
            digest = checksum(_bytes_of(self._parameters[index], start - self._starts[index], end - start)) ^ (
                digest * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF
            )
            left -= end - start
            start = end % self._total
        return digest & 0xFFFF_FFFF


def _fills_its_memory(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or dense_strides(tensor) is not None


def _bytes_of(tensor: Tensor, start: int, size: int) -> memoryview:
    """Part of the memory of a tensor that fills it, in whatever order. The tensor must outlive the view."""
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() + start)).cast("B")
