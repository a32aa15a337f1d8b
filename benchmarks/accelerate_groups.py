"""Step time with FaultTolerantAccelerator in groups of two ranks over DDP on the same processes: see `accelerate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.accelerate import rows

if TYPE_CHECKING:
    from benchmarks.common import Options, Row


def measure(options: Options) -> list[Row]:
    """`runs` sets of processes."""
    return rows(options, "4M")
