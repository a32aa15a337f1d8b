"""The prepared optimizer and scheduler: a step is made by all replicas or by none, and the schedule follows.

How it works. `step` puts the step to the vote when gradients are synchronized (`Run.vote`) and makes it on a commit. A
veto shows as `step_was_skipped`, as an overflow of the GradScaler does, so Accelerate's scheduler stays where it is.

A prepared scheduler makes as many steps per optimizer step as there are processes; here those of all groups of the
complete job count, so that a schedule is the same as with one group that large, whoever is away. With elastic data it
makes as many as the committed step had batches of the loader as the user wrote it, so that an epoch is always worth the
same.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_accelerate import _compat
from ft_accelerate.elastic_steps import learning_rates
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_accelerate.run import Run


class VotedOptimizer(_compat.AcceleratedOptimizer):  # type: ignore[misc]
    """What `prepare` makes of an optimizer.

    Args:
        optimizer: torch's.
        run: asked before each step.
        options: of AcceleratedOptimizer.
    """

    def __init__(self, optimizer: Any, run: Run, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._run: Run | None = run
        self._vetoed = False

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step if gradients are synchronized and all replicas commit.

        Raises:
            ConfigError: a closure was given; it may evaluate the model any number of times.
        """
        run = self._run
        if run is None or not run.models or not self.gradient_state.sync_gradients:
            super().step(closure)
            return
        if closure is not None:
            raise ConfigError(
                f"{type(self.optimizer).__name__}.step(closure) cannot be used with fault tolerance: each evaluation "
                "of the closure would be a step of its own to agree on; call backward yourself, then step()"
            )
        if run.elastic is not None:
            run.elastic.check_vote(again=run.voted and run.unsettled)
        self._vetoed = not run.vote()
        if self._vetoed:
            _compat.reset_scaler(self.scaler)
            return
        try:
            with learning_rates(run, self.optimizer):
                super().step()
        except BaseException as error:
            run.torn(error)
            raise

    @property
    def step_was_skipped(self) -> bool:
        """The last step was not made: the replicas did not commit it, or gradients overflowed."""
        return self._vetoed or bool(super().step_was_skipped)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() if self.scaler is not None else dict(vars(self))
        return {**state, "_run": None}


class GroupScheduler(_compat.AcceleratedScheduler):  # type: ignore[misc]
    """What `prepare` makes of a scheduler.

    Args:
        scheduler: torch's.
        optimizers: whose steps it follows.
        run: knows how many groups there are.
        options: of AcceleratedScheduler.
    """

    def __init__(self, scheduler: Any, optimizers: Any, run: Run, **options: Any) -> None:
        super().__init__(scheduler, optimizers, **options)
        self._run: Run | None = run

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one optimizer step, unless that was skipped."""
        follows = self.step_with_optimizer and not self.split_batches and self.gradient_state.sync_gradients
        if follows and self._run is not None and self._run.elastic is not None:
            self._follow_samples(self._run.elastic.advanced, *args, **kwargs)
            return
        for _ in range(self._run.groups if follows and self._run is not None else 1):
            super().step(*args, **kwargs)

    def _follow_samples(self, batches: int, *args: Any, **kwargs: Any) -> None:
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(batches):
            total = getattr(self.scheduler, "total_steps", None)  # OneCycleLR allows no more
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}
