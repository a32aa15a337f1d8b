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
        if self._modules["module"].training:  # type: ignore[union-attr]
            if not self._switched:  # assigning to a module's attribute takes longer than the rest of this
                self._switched = True
            return True
        return not self._switched and self.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if self._run is not None and self._run.aside:
            with self.no_sync():  # a loss may need gradients also where it is only evaluated
                return super().forward(*inputs, **kwargs)
        if self._run is not None and self.in_training_mode and torch.is_grad_enabled():
            self._run.before_forward()
            if self._run.silent:
                with self.no_sync():
                    return super().forward(*inputs, **kwargs)
            self._run.settling.passes += self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)

    def drop_gradients(self) -> None:
        """The step is not made."""
        for parameter in self.parameters():
            parameter.grad = None

    def share_buffers(self) -> None:
        """Each ring has its own buffers; as with torch's DDP those of the group's first rank count."""
        for buffer in self.buffers() if self.broadcast_buffers else ():
            torch.distributed.broadcast(buffer, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run": None}
