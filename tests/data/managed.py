"""A model that counts what it was taught.

The counting model has one parameter per sample and epoch. A sample's gradient is minus one at its own place, so after
SGD with a learning rate of one the parameter *is* the number of times that sample went into a committed step, through
the real reductions, weights and heals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ft_core.data import ElasticDataLoader


class Counting(nn.Module):
    """Parameters that count samples per epoch."""

    def __init__(self, length: int, epochs: int) -> None:
        super().__init__()
        self.length = length
        self.counts = nn.Parameter(torch.zeros(epochs * length))

    def forward(self, places: Tensor) -> Tensor:
        return -self.counts[places].mean()

    def loss(self, wrapped: nn.Module, loader: ElasticDataLoader, batch: Tensor) -> Tensor:
        """Mean over the micro-batch, times what makes the committed gradient a sum over the step's samples."""
        loss: Tensor = wrapped(batch + loader.epoch * self.length)
        return loss * loader.step_samples

    def faults(self) -> list[str]:
        """Samples that did not go into exactly one committed step of each epoch."""
        counts = self.counts.detach()
        wrong = ((counts - 1).abs() > 1e-3).nonzero().flatten().tolist()
        return [f"epoch {p // self.length} sample {p % self.length}: {counts[p]:.3f}" for p in wrong]
