"""What workers of these tests have imported already (`tests.forge`)."""

from __future__ import annotations

from tests.forge import Forge, Forged

__all__ = ["IMPORTS", "Forge", "Forged"]
IMPORTS = (
    "lightning", "lightning.pytorch.loggers", "lightning.pytorch.callbacks", "lightning.pytorch.cli",
    "ft_lightning.strategy", "ft_lightning.fabric", "ft_lightning.monitor", "ft_lightning._compat_writers",
)  # fmt: skip
