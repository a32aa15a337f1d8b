"""What workers of these tests have imported already (`tests.forge`)."""

from __future__ import annotations

from tests.forge import Forge, Forged

__all__ = ["IMPORTS", "Forge", "Forged"]
IMPORTS = (
    "lightning", "lightning.pytorch.loggers", "lightning.pytorch.callbacks", "lightning.pytorch.cli",
    "ft_lightning.trainer.strategy", "ft_lightning.trainer.sharded_strategy", "ft_lightning.fabric.strategy",
    "ft_lightning.trainer.monitor", "ft_lightning._compat.writers",
)  # fmt: skip
