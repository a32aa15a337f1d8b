"""`Fabric(strategy="fault_tolerant")`. To give it arguments: `from ft_lightning.fabric import FaultTolerantStrategy`.

The class belongs to the Fabric that is imported, `lightning.fabric` or `lightning_fabric`; if both are, to the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    FaultTolerantStrategy: Any

__all__ = ["FaultTolerantStrategy"]


def __getattr__(name: str) -> Any:
    if name == "FaultTolerantStrategy":
        from ft_lightning import _compat
        from ft_lightning.fabric.strategy import strategy_class

        return strategy_class(_compat.imported(_compat.FABRICS))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
