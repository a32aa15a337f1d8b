"""`ShardedModel`: FSDP2 models of a training run; their forwards belong to its windows, as those of a `WindowedModel`.

How it works. `ft_core.fsdp.Replicated` averages the shards over the groups. Here a forward that records gradients opens
the quorum if nobody has; while there is none the gradients stay inside the group. The modules are not wrapped: the
script goes on with those that it has.

Threads: the training thread.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ft_core.fsdp import Replicated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from ft_core.loop.model import ForwardWindow
    from ft_core.reduction.bucket_plan import BucketSettings
    from ft_core.reduction.interface import ShardManager


class ShardedModel(Replicated):
    """Sharded modules whose gradients are averaged over the replica groups, in the windows of a run.

    Args:
        manager: of the run.
        window: of the run.
        modules: the roots, on which `fully_shard` was called last.
        settings: of the buckets.
    """

    broadcast_buffers = sharded = True

    def __init__(
        self, manager: ShardManager, window: ForwardWindow, modules: tuple[nn.Module, ...], settings: BucketSettings
    ) -> None:
        super().__init__(manager, modules, settings)
        self._window = window

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules as the script has them."""
        return self.modules

    @property
    def in_training_mode(self) -> bool:
        """Of the first root, which scripts switch."""
        return self.modules[0].training

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all roots."""
        return itertools.chain.from_iterable(module.parameters() for module in self.modules)

    def buffers(self) -> Iterator[Tensor]:
        """Of all roots."""
        return itertools.chain.from_iterable(module.buffers() for module in self.modules)

    def retire(self) -> None:
        """The run is over."""
        self.unwrap()

    def _crosses(self) -> bool:
        if self._window.aside:
            return False
        if self.in_training_mode:
            self._window.before_forward()
        return not self._window.silent

    def _unannounced(self) -> bool:
        return super()._unannounced() and self._window.is_open and not self._window.silent
