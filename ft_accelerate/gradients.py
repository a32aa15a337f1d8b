"""`SettledGradients`: backward, accumulation and clipping of an Accelerator; gradients are final when they are used.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ft_accelerate import _compat, refusals, uneven
from ft_accelerate.model import WrappedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ft_accelerate.run import Run
    from ft_core.loop.window import StepWindow

Base: Any = object


class SettledGradients(Base):  # type: ignore[misc]
    """The part of the Accelerator that makes and uses gradients; mixed in, in front of `ElasticSteps`."""

    _optimizers: list[Any]

    if TYPE_CHECKING:
        _run: Run | None

        @property
        def _window(self) -> StepWindow | None:
            """The window of the run; None without fault tolerance."""

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Accumulate gradients locally inside, also in a group of one process."""
        with model.no_sync() if isinstance(model, WrappedModel) else super().no_sync(model):
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        """Synchronize in the next backward, inside `no_sync`."""
        if isinstance(model, WrappedModel) and not model.stays_silent:
            model.gradient_reducer.before_backward(sync=True)
        with _compat.Accelerator.trigger_sync_in_backward(model):
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Train inside on loaders of different lengths, in all groups, also of one process.

        Raises:
            ConfigError: several models or optimizers, or others than were prepared.
        """
        run = self._run
        if run is None:
            return super().join_uneven_inputs(joinables, even_batches)
        return uneven.joined(self, run.uneven, joinables, even_batches, lambda: run.elastic.feed is not None)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward; afterwards gradients are averaged over all groups if they are synchronized."""
        super().backward(loss, **kwargs)
        run = self._run
        if run is not None:
            models = run.window.models
            if not (run.owners_known or run.window.aside):
                run.owners_known = refusals.check_owners(models, self._optimizers)
            run.window.settle_gradients()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients, which are final then."""
        self._settle_gradients()
        super().unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Clip the norm of the gradients, which are final then."""
        self._settle_gradients()
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: Any) -> None:
        """Clip the values of the gradients, which are final then."""
        self._settle_gradients()
        super().clip_grad_value_(parameters, clip_value)

    def _settle_gradients(self) -> None:
        if self._window is not None:
            self._window.settle_gradients()
