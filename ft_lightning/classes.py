"""`strategy_class`, `fsdp2_strategy_class`: the strategies for each of Lightning's class trees.

Lightning exists as `lightning` and as `pytorch_lightning` with `lightning_fabric`, which know nothing of each other.
"""

from __future__ import annotations

from ft_core.errors import ConfigError
from ft_lightning import _compat
from ft_lightning.fabric import strategy as _fabric
from ft_lightning.trainer import strategy as _trainer


def strategy_class(tree: str = "lightning.pytorch") -> type:
    """FaultTolerantStrategy for `lightning.pytorch`, `pytorch_lightning`, `lightning.fabric` or `lightning_fabric`.

    Raises:
        ConfigError: there is no such tree.
    """
    if tree == "lightning":
        tree = "lightning.pytorch"
    if tree in _compat.FABRICS:
        return _fabric.strategy_class(tree)
    if tree not in _compat.TREES:
        raise ConfigError(f"strategy_class({tree!r}): known are {', '.join((*_compat.TREES, *_compat.FABRICS))}")
    return _trainer.strategy_class(tree)


def fsdp2_strategy_class(tree: str = "lightning.pytorch") -> type:
    """FaultTolerantFSDP2Strategy for `lightning.pytorch` or `pytorch_lightning`.

    Raises:
        ConfigError: there is no such tree of the Trainer.
    """
    if tree == "lightning":
        tree = "lightning.pytorch"
    if tree not in _compat.TREES:
        raise ConfigError(f"fsdp2_strategy_class({tree!r}): known are {', '.join(_compat.TREES)}")
    from ft_lightning.trainer import sharded_strategy  # half a second, which is only for those who shard

    return sharded_strategy.strategy_class(tree)
