"""`ElasticSteps`: what an Accelerator does otherwise while an elastic loader is read for training.

How it works. The loader knows when a step is complete, so `accumulate` synchronizes at its last micro-batch, however
many there were. Micro-batches are averaged by their weights (`Manager.set_batch_weight`), so `backward` does not divide
the loss by `gradient_accumulation_steps`. With several models the reduced gradients are divided by the sum of weights
in the vote only; until then they are a known number of times too large, and clipping allows for that.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ft_accelerate.elastic.feed import is_elastic
from ft_core.optim import learning_rates_times

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from ft_accelerate.elastic.feed import ElasticFeed, TrainedFeed
    from ft_core.data.scaling import LearningRateScaling
    from ft_core.loop.window import StepWindow

Base: Any = object


class ElasticSteps(Base):  # type: ignore[misc]
    """The part of the Accelerator that knows elastic data; mixed in, in front of Accelerate's."""

    gradient_state: Any
    gradient_accumulation_steps: int
    step: int

    if TYPE_CHECKING:

        @property
        def _window(self) -> StepWindow | None:
            """The window of the run; None without fault tolerance."""

        @property
        def _trained(self) -> TrainedFeed | None:
            """Where the run keeps its feed."""

        def _prepare_elastic(self, loader: Any) -> Any:
            """A loader of the user's that is elastic, prepared."""

    @property
    def _feed(self) -> ElasticFeed | None:
        """The elastic data that is being read for training."""
        feed = self._trained.feed if self._trained is not None else None
        return feed if feed is not None and feed.active else None

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare objects; an `ElasticDataLoader` is prepared like a DataLoader."""
        ready = [self._prepare_elastic(item) if is_elastic(item) else item for item in args]
        return super().prepare(*ready, device_placement=device_placement)

    def _do_sync(self) -> None:
        feed = self._feed
        if feed is None:
            super()._do_sync()
            return
        complete = feed.sampler.last_micro_batch
        self.step = 0 if complete else self.step + 1
        self.gradient_state._set_sync_gradients(complete)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward; with elastic data the loss is the mean over the samples of its micro-batch."""
        feed, steps = self._feed, self.gradient_accumulation_steps
        if feed is None:
            super().backward(loss, **kwargs)
            return
        factor = feed.loss_factor
        self.gradient_accumulation_steps = 1
        try:
            super().backward(loss if factor == 1.0 else loss * factor, **kwargs)
        finally:
            self.gradient_accumulation_steps = steps

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Clip the norm of gradients, which may be a known number of times too large."""
        times = self._times_too_large
        if times == 1.0:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        norm = super().clip_grad_norm_(parameters, max_norm * times, norm_type)
        return None if norm is None else norm / times

    def clip_grad_value_(self, parameters: Any, clip_value: Any) -> None:
        """Clip the values of gradients, which may be a known number of times too large."""
        super().clip_grad_value_(parameters, clip_value * self._times_too_large)

    @property
    def _times_too_large(self) -> float:
        feed, window = self._feed, self._window
        if feed is None or window is None or window.silent or window.manager is None:
            return 1.0
        return feed.undivided(window.manager.hooks.current_attempt())


def learning_rates(
    scaling: LearningRateScaling | None, window: StepWindow, trained: TrainedFeed, optimizer: Any
) -> AbstractContextManager[None]:
    """Inside, the learning rates of the step that was just committed (`lr_scaling`)."""
    if scaling is None or window.manager is None:
        return contextlib.nullcontext()
    samples = trained.feed.samples if trained.feed is not None else 0
    weight = samples or window.manager.last_commit_weight * window.ranks
    return learning_rates_times(optimizer, scaling.factor(weight))
