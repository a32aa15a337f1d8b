"""The prepared optimizer and scheduler: a step is made by all replicas or by none, and the schedule follows.

How it works. `step` puts the step to the vote when gradients are synchronized (`StepWindow.vote`) and makes it on a
commit. A veto shows as `step_was_skipped`, as an overflow of the GradScaler does, so Accelerate's scheduler stays where
it is.

A prepared scheduler makes as many steps per optimizer step as there are processes; here those of all groups of the
complete job count, so that a schedule is the same as with one group that large, whoever is away. With elastic data it
makes as many as the committed step had batches of the loader as the user wrote it, so that an epoch is always worth the
same.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_accelerate import _compat
from ft_accelerate.elastic.feed import TrainedFeed
from ft_accelerate.elastic.steps import learning_rates
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.data.scaling import LearningRateScaling
    from ft_core.loop.window import StepWindow


class VotedOptimizer(_compat.AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that `prepare` makes: its steps are put to the vote.

    Args:
        optimizer: torch's.
        window: asked before each step.
        trained: the elastic data that the run trains on.
        scaling: of learning rates with the samples of each step; None: none.
        options: of AcceleratedOptimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        window: StepWindow,
        trained: TrainedFeed,
        scaling: LearningRateScaling | None,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, **options)
        self._window: StepWindow | None = window
        self._trained = trained
        self._scaling = scaling
        self._vetoed = False
        self.makes_state = False
        """Its steps only make torch's optimizer create its state: neither voted on nor counted."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step if gradients are synchronized and all replicas commit.

        Raises:
            ConfigError: a closure was given; it may evaluate the model any number of times.
        """
        window, feed = self._window, self._trained.feed
        if self.makes_state:
            self.optimizer.step(closure)
            return
        if window is None or not window.models or not self.gradient_state.sync_gradients:
            super().step(closure)
            return
        if closure is not None:
            raise ConfigError(
                f"{type(self.optimizer).__name__}.step(closure) cannot be used with fault tolerance: each evaluation "
                "of the closure would be a step of its own to agree on; call backward yourself, then step()"
            )
        if feed is not None:
            feed.check_vote(again=window.voted and window.unsettled)
        self._vetoed = not window.vote()
        if self._vetoed:
            _compat.reset_scaler(self.scaler)
            return
        try:
            with learning_rates(self._scaling, window, self._trained, self.optimizer):
                super().step()
        except BaseException as error:
            window.torn(error)
            raise

    @property
    def step_was_skipped(self) -> bool:
        """The last step was not made: the replicas did not commit it, or gradients overflowed."""
        return self._vetoed or bool(super().step_was_skipped)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() if self.scaler is not None else dict(vars(self))
        return {**state, "_window": None, "_trained": TrainedFeed()}


class GroupScheduler(_compat.AcceleratedScheduler):  # type: ignore[misc]
    """The scheduler that `prepare` makes: it follows the committed steps of all groups.

    Args:
        scheduler: torch's.
        optimizers: whose steps it follows.
        window: knows how many groups there are.
        trained: the elastic data that the run trains on.
        options: of AcceleratedScheduler.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, window: StepWindow, trained: TrainedFeed, **options: Any
    ) -> None:
        super().__init__(scheduler, optimizers, **options)
        self._window: StepWindow | None = window
        self._trained = trained

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one optimizer step, unless that was skipped."""
        follows = self.step_with_optimizer and not self.split_batches and self.gradient_state.sync_gradients
        window, feed = self._window, self._trained.feed
        if follows and window is not None and feed is not None:
            self._follow_samples(feed.advanced, *args, **kwargs)
            return
        for _ in range(window.groups if follows and window is not None else 1):
            super().step(*args, **kwargs)

    def _follow_samples(self, batches: int, *args: Any, **kwargs: Any) -> None:
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(batches):
            total = getattr(self.scheduler, "total_steps", None)  # OneCycleLR allows no more
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_window": None, "_trained": TrainedFeed()}
