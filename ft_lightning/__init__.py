"""Fault tolerance for Lightning: `Trainer(strategy="fault_tolerant")` and `Fabric(strategy="fault_tolerant")`.

The strategy is there by name once this package is installed; nothing has to be imported. To give it arguments:

    from ft_lightning import FaultTolerantStrategy

    Trainer(strategy=FaultTolerantStrategy(min_replicas=2, timeout=30))

`Trainer(strategy="fault_tolerant_fsdp2")`, or `FaultTolerantFSDP2Strategy`, is for models that are sharded inside each
replica group (FSDP2).

Lightning exists as `lightning` and as `pytorch_lightning`, two packages that know nothing of each other.
`ft_lightning.FaultTolerantStrategy` belongs to the one that is imported; if both are, to `lightning`, and
`ft_lightning.classes.strategy_class("pytorch_lightning")` is the other one. For Fabric: `ft_lightning.fabric`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_lightning import registration

if TYPE_CHECKING:
    FaultToleranceMonitor: Any
    FaultTolerantFSDP2Strategy: Any
    FaultTolerantStrategy: Any

__all__ = ["FaultToleranceMonitor", "FaultTolerantFSDP2Strategy", "FaultTolerantStrategy"]

registration.install()


def __getattr__(name: str) -> Any:
    if name == "FaultTolerantStrategy":
        from ft_lightning import _compat
        from ft_lightning.classes import strategy_class

        return strategy_class(_compat.imported(_compat.TREES))
    if name == "FaultTolerantFSDP2Strategy":
        from ft_lightning import _compat
        from ft_lightning.classes import fsdp2_strategy_class

        return fsdp2_strategy_class(_compat.imported(_compat.TREES))
    if name == "FaultToleranceMonitor":
        from ft_lightning.trainer import monitor

        return monitor.monitor_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
