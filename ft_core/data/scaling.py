"""Learning rates that follow the batch: the explicit alternative to a constant global batch. Pure."""

from __future__ import annotations

import math

from ft_core.errors import ConfigError

__all__ = ["learning_rate_factor"]


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
