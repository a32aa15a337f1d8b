"""`WindowedModel`: a `GroupModel` whose forwards belong to the windows of a training run.

How it works. A forward that records gradients opens the quorum if nobody has, and stays silent (as under `no_sync`)
while there is none: a quorum that broke is formed anew with the next window only.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from ft_core.loop.group_model import GroupModel

if TYPE_CHECKING:
    from ft_core.loop.inside_group import InsideGroup
    from ft_core.manager import Manager


class ForwardWindow(Protocol):
    """The window that a forward belongs to (`window.StepWindow`), as far as it asks it."""

    aside: bool
    stopped: bool
    inside: InsideGroup

    @property
    def silent(self) -> bool:
        """Nothing may be communicated with the other groups now."""

    @property
    def is_open(self) -> bool:
        """A quorum was opened for the step that is under way, and nothing was voted on."""

    def before_forward(self) -> None:
        """Open the window, if it is the forward's turn."""


class WindowedModel(GroupModel):
    """Opens the quorum if nobody has, and stays silent while there is none.

    Args:
        manager: of the run; None: it is passed over, and nothing is trained.
        window: of the run whose steps its gradients belong to.
        module: the model.
        kwargs: of torch's DistributedDataParallel.
    """

    def __init__(self, manager: Manager | None, window: ForwardWindow, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(manager, window.inside, module, **kwargs)
        self._window: ForwardWindow | None = window
        self._switched = False
        """The model inside has been in training mode: it follows the script's calls of `train()`."""

    @property
    def stays_silent(self) -> bool:
        """Its gradients may not be communicated now."""
        return self._window is not None and self._window.silent

    @property
    def in_training_mode(self) -> bool:
        """The mode of the model inside, which scripts may switch alone; one that was never switched: of this wrapper.

        Pretrained models come in evaluation mode, and some scripts train them so.
        """
        if self._modules["module"].training:  # type: ignore[union-attr]
            if not self._switched:  # assigning to a module's attribute takes longer than the rest of this
                self._switched = True
            return True
        return not self._switched and self.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model, in a window that is open, or silently."""
        window = self._window
        if self._reducer is None and window is not None and window.stopped:
            return self.module(*inputs, **kwargs)  # the run is passed over, or over
        if window is not None and window.aside:
            with self.no_sync():  # a loss may need gradients also where it is only evaluated
                return super().forward(*inputs, **kwargs)
        if window is not None and self.in_training_mode and torch.is_grad_enabled():
            window.before_forward()
            if window.silent:
                with self.no_sync():
                    return super().forward(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_window": None}
