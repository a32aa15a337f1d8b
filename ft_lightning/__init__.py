"""Fault tolerance for Lightning: `Trainer(strategy="fault_tolerant")`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    FaultTolerantStrategy: Any

__all__ = ["FaultTolerantStrategy"]


def __getattr__(name: str) -> Any:
    if name == "FaultTolerantStrategy":
        from ft_lightning.strategy import strategy_class

        return strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
