"""Fault tolerance for Accelerate scripts and transformers.Trainer.

    from ft_accelerate import FaultTolerantAccelerator as Accelerator

is the whole change to a script. Nothing heavy is imported before a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_accelerate.accelerator import FaultTolerantAccelerator
    from ft_accelerate.debug import ft_debug_launcher
    from ft_accelerate.plugin import FaultTolerancePlugin

    FaultTolerantTrainer: Any
    FaultTolerantTrainerMixin: Any

_HOMES = {
    "FaultTolerantAccelerator": "accelerator",
    "FaultTolerancePlugin": "plugin",
    "ft_debug_launcher": "debug",
    "FaultTolerantTrainer": "trainer.trainer",
    "FaultTolerantTrainerMixin": "trainer.trainer",
}
__all__ = [
    "FaultTolerantAccelerator",
    "FaultTolerancePlugin",
    "FaultTolerantTrainer",
    "FaultTolerantTrainerMixin",
    "ft_debug_launcher",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ft_accelerate.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
