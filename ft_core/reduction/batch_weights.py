"""Weights of micro-batches: what makes the committed gradient that of the mean over all samples of all replicas.

How it works. A loss is a mean over n samples (or tokens), so a micro-batch's gradient counts n times. The sum of an
attempt's weights rides in the fence. Micro-batches that are accumulated before the reduction share one factor there:
that of the first one, the *reference*. The others are weighed on their way into `param.grad`: backward is linear in the
gradient of the wrapped module's outputs, so these are multiplied by n / reference (`weigh_outputs`), and what leaves
through its inputs, into other modules that weigh for themselves, by the inverse (`unweigh_inputs`).

Invariant: p.grad before a reduction is the sum of (n_i / reference) * gradient_i, whatever the order of forward and
backward passes. Threads: the training thread.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from copy import copy
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from ft_core.errors import ConfigError, UsageError
from ft_core.protocol.rank.ballot import MAX_WEIGHT


class BatchWeights:
    """Weights of the micro-batches of one attempt."""

    def __init__(self) -> None:
        self.total: int | None = None
        """None: no weight was set, the gradient counts as one."""
        self.current = 0
        """The weight of the micro-batch whose forward comes next."""
        self.reference = 0
        """What p.grad counts as: the weight of the first micro-batch that has any, after a reduction the sum."""
        self._reduced_nothing = False

    def __repr__(self) -> str:
        return f"BatchWeights(total={self.total}, current={self.current}, reference={self.reference})"

    def add(self, weight: object) -> int:
        """The next micro-batch weighs `weight`. Returns the sum.

        Raises:
            ConfigError: it is not a whole number from 0 on, or the sum is more than a fence carries.
            UsageError: gradients were reduced in this step, and nothing of this replica was in them.
        """
        if self._reduced_nothing:
            raise UsageError(
                f"set_batch_weight({weight!r}) after a reduced backward of the same step whose weight was 0: the "
                "others' gradients are in p.grad already; run all but the last backward of a step under no_sync()"
            )
        whole = isinstance(weight, numbers.Integral) and not isinstance(weight, bool)
        if not whole or int(weight) < 0:  # type: ignore[call-overload]
            raise ConfigError(
                f"set_batch_weight({weight!r}): must be the number of samples or tokens in the micro-batch, an integer "
                "from 0 on"
            )
        number = int(weight)  # type: ignore[call-overload]
        total: int = (self.total or 0) + number
        if total > MAX_WEIGHT:
            raise ConfigError(
                f"set_batch_weight({weight!r}): one replica's weights of a step may add up to {MAX_WEIGHT}, these to "
                f"{total}; use a larger unit"
            )
        self.total, self.current = total, number
        self.reference = self.reference or number
        return total

    @property
    def ratio(self) -> float:
        """What the next micro-batch's gradient is multiplied with on its way into p.grad."""
        if self.total is None:
            return 1.0
        return self.current / self.reference if self.current else 0.0

    def reduced(self) -> None:
        """p.grad is now the mean over everybody's micro-batches so far, wherever they were."""
        self.reference = self.total or 0
        self._reduced_nothing = self.total == 0

    def reset(self) -> None:
        """The attempt has ended."""
        self.total, self.current, self.reference, self._reduced_nothing = None, 0, 0, False


def refuse_unequal(weights: tuple[int, ...]) -> NoReturn:
    """Refuse weights that differ between the ranks of a group whose gradients are means over its ranks (FSDP2's).

    Args:
        weights: one per rank; 1 of one that has set none.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "set_batch_weight: with a sharded model all ranks of a group must set the same weight, because FSDP2 takes the "
        f"mean over them as over equals, but those of this group have set {', '.join(map(str, weights))} (1: or none). "
        "Set the sum over the ranks of the group on each of them, and multiply each rank's loss by its own number "
        "times the number of ranks divided by that sum (with an elastic loader: sampler.equal_micro_steps = True, and "
        "the loss times sampler.loss_factor)"
    )


def weigh_outputs(output: Any, ratio: float) -> Any:
    """The same output, whose gradient is multiplied by `ratio` before it enters the module that made it.

    The tensors are new ones: one output may have been computed from another (a loss from logits), and must not be
    weighed twice.

    Raises:
        UsageError: no tensor was found in the output.
    """
    weigher = _Weigher(ratio)
    weighed = weigher.weigh(output)
    if not weigher.tensors:
        raise UsageError(
            f"micro-batches of different weights in one step, but the module's output, a {type(output).__name__}, "
            "shows no tensor to weigh: return tensors, or tuples, lists, dicts or dataclasses of tensors"
        )
    return weighed


def unweigh_inputs(inputs: Any, ratio: float) -> Any:
    """The same inputs of a module whose outputs are weighed; their gradient is what it would be without weights.

    At ratio 0 there is nothing left to divide: they get no gradient, like everything in that micro-batch.
    """
    return _Weigher(1.0 / ratio).weigh(inputs) if ratio else inputs


class _Weigher:
    def __init__(self, ratio: float) -> None:
        self.tensors = 0
        self._ratio = ratio

    def weigh(self, value: Any) -> Any:
        return tree_map(self._weigh_one, value)

    def _weigh_one(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors += 1
            if not value.requires_grad:
                return value
            # A view that is changed in place (`loss *= 2`) loses its hooks. Losses are copied; large tensors are not.
            weighed = value.clone() if value.numel() == 1 else value.view_as(value)
            weighed.register_hook(functools.partial(_multiply, self._ratio))
            return weighed
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(changed, field.name, self.weigh(getattr(value, field.name)))
            return changed
        return value


def _multiply(ratio: float, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * ratio if ratio else torch.zeros_like(gradient)  # a mean over nothing is NaN
