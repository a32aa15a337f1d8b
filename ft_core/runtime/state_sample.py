"""A digest of a part of the parameters at each step, another part each time: finds replicas that silently differ.

How it works. The parameters are cut into windows of a few ranges each; step n looks at one window, the next step at the
next. The digest rides in the fence, where its sum shows whether all members have the same (`ballot`). It is taken when
a step opens: only then is the state surely that of the last commit, because a script may change parameters within a
step (sharpness-aware minimization does).

Invariants: which bytes a step looks at depends on the layout and the number of the step only, so it is the same on all
members. What is not in the memory of the CPU, or has holes between its elements, is left out (on all members). A pass
over everything takes `steps` steps at most.
Threads: the training thread.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from ft_core.checkpointing.tensor_bytes import checksum
from ft_core.strides import fills_its_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.reduction.interface import Parameter

WINDOW_BYTES, WINDOW_RANGES = 16 << 10, 4
"""A window has as much if the parameters fit into `steps` such: it costs about five microseconds."""


class StateSample:
    """What is compared of the parameters of all wrapped modules.

    Args:
        parameters: in an order that is the same on all replicas.
        steps: within how many steps every byte is looked at, at the latest.
    """

    def __init__(self, parameters: Sequence[Parameter], steps: int) -> None:
        self._parameters = [p for p in parameters if p.device.type == "cpu" and fills_its_memory(p)]
        self._windows = _windows([p.numel() * p.element_size() for p in self._parameters], steps)

    def __repr__(self) -> str:
        return f"StateSample({len(self._parameters)} parameters in {len(self._windows)} windows)"

    def take(self, step: int) -> int | None:
        """Digest, 32 bits, of the window of `step`; None if there is nothing to compare."""
        if not self._windows:
            return None
        digest = step
        for index, start, size in self._windows[step % len(self._windows)]:
            # Where a parameter lies is asked for each time: a script may give it other memory.
            memory = (ctypes.c_char * size).from_address(self._parameters[index].data_ptr() + start)
            digest = (digest * 0x9E37_79B9_7F4A_7C15 & 0xFFFF_FFFF_FFFF_FFFF) ^ checksum(memoryview(memory).cast("B"))
        return (digest ^ digest >> 32) & 0xFFFF_FFFF


def _windows(sizes: Sequence[int], steps: int) -> list[list[tuple[int, int, int]]]:
    """Ranges (index, first byte, bytes) of all of `sizes`, in at most `steps` windows."""
    steps = max(1, steps)
    total = sum(sizes)
    most = max(WINDOW_BYTES, -(-2 * total // steps))
    ranges = [(i, at, min(most, size - at)) for i, size in enumerate(sizes) for at in range(0, size, most)]
    count = max(WINDOW_RANGES, -(-2 * len(ranges) // steps))
    windows: list[list[tuple[int, int, int]]] = []
    room = 0
    for part in ranges:
        if not windows or part[2] > room or len(windows[-1]) == count:
            windows.append([])
            room = most
        windows[-1].append(part)
        room -= part[2]
    return windows
