"""`WrappedModel`: ft_core's DistributedDataParallel, as `prepare` wraps a model in it.

How it works. A forward that records gradients opens the quorum if nobody has, and stays silent (as under `no_sync`)
while there is none: a quorum that broke is formed anew with the next window only.

Attributes that it does not have are the model's, as if that were not wrapped.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ft_core.ddp import DistributedDataParallel

if TYPE_CHECKING:
    from ft_accelerate.run import Run


class WrappedModel(DistributedDataParallel):
    """A prepared model: opens the quorum if nobody has, and stays silent while there is none.

    Args:
        run: the run whose steps its gradients belong to.
        module: the model.
        kwargs: of torch's DistributedDataParallel.
    """

    def __init__(self, run: Run, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(run.start_manager(), module, **kwargs)
        self._run: Run | None = run
        self._switched = False
        """The model inside has been in training mode: it is told."""

    def __getattr__(self, name: str) -> Any:
        # Accelerate leaves a model unwrapped in a job of one process, and scripts for that use its attributes.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("_"):
                raise
            return getattr(self.module, name)

    @property
    def in_training_mode(self) -> bool:
        """What the model inside says, which scripts may switch alone; one that was never told: what this wrapper says.

        Pretrained models come in evaluation mode, and some scripts train them so.
        """
        self._switched = self._switched or self.module.training
        return self.module.training if self._switched else self.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if self._run is not None and self.in_training_mode and torch.is_grad_enabled():
            self._run.before_forward()
            if self._run.silent:
                with self.no_sync():
                    return super().forward(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run": None}
