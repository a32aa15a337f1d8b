"""`ftrun`: launches, supervises and restarts replica groups. `supervisor` is the whole, `options` the command line.

`GroupAgent` runs one group from Python; it is loaded on first use, because workers are started through this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_core.launch.library import GroupAgent as GroupAgent
    from ft_core.launch.library import WorkerGroupFailureException as WorkerGroupFailureException

__all__ = ["GroupAgent", "WorkerGroupFailureException"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ft_core.launch' has no attribute {name!r}")
    return getattr(importlib.import_module("ft_core.launch.library"), name)
