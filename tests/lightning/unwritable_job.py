"""The program of test_unwritable.py: two groups, Lightning's own logger, and the folder it is to write in."""

from __future__ import annotations

import sys

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

from ft_lightning import FaultTolerantStrategy

if __name__ == "__main__":
    L.Trainer(
        strategy=FaultTolerantStrategy(timeout=2), accelerator="cpu", devices=2, max_steps=5,
        default_root_dir=sys.argv[1], enable_progress_bar=False,
    ).fit(BoringModel())  # fmt: skip
