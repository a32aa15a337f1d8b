"""Learning rates that follow the batch: the explicit alternative to a constant global batch. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ft_core.errors import ConfigError

__all__ = ["LearningRateScaling", "learning_rate_factor"]


@dataclass(frozen=True, slots=True)
class LearningRateScaling:
    """Learning rates follow the weight of each committed step: what the gradients were divided by.

    With the elastic loader, or `Manager.set_batch_weight`, that is the number of samples in the step; else the number
    of replicas.

    Args:
        rule: "linear" or "sqrt", see `learning_rate_factor`.
        reference: the weight of a step for which the learning rates were chosen.

    Raises:
        ConfigError: another rule, or a reference below 1.
    """

    rule: str
    reference: int

    def __post_init__(self) -> None:
        if isinstance(self.reference, bool) or not isinstance(self.reference, int):
            raise ConfigError(f"reference must be an int, got {self.reference!r}: samples in the step the rate is for")
        if self.reference < 1:
            raise ConfigError(f"reference={self.reference}: must be at least 1: samples in the step the rate is for")
        learning_rate_factor(1, self.reference, self.rule)

    def factor(self, weight: int) -> float:
        """What learning rates are multiplied with in a step of this weight."""
        return learning_rate_factor(weight, self.reference, self.rule)


def learning_rate_factor(samples: int, reference: int, rule: str) -> float:
    """How a learning rate that was tuned for `reference` samples per step follows a step of `samples`.

    Args:
        samples: in this step, over all replicas (`ElasticSampler.step_samples`).
        reference: in the steps for which the learning rate was chosen.
        rule: "linear" (Goyal et al. 2017) or "sqrt" (Krizhevsky 2014).

    Raises:
        ConfigError: another rule, or a number below 1.
    """
    if samples < 1 or reference < 1:
        raise ConfigError(f"samples={samples} and reference={reference} must be at least 1")
    if rule == "linear":
        return samples / reference
    if rule == "sqrt":
        return math.sqrt(samples / reference)
    raise ConfigError(f"rule={rule!r}: must be 'linear' or 'sqrt'")
