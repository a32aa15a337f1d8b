"""`GroupModel`: DistributedDataParallel in a replica group of one or several ranks, which share the way to the others.

How it works. With one rank it is DistributedDataParallel. With several, gradients are reduced in the group and across
groups by a `GroupReducer`, and are final, and equal on all ranks, when `backward()` returns.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.ddp import DistributedDataParallel
from ft_core.reduction.group_reducer import GroupReducer

if TYPE_CHECKING:
    from torch import nn

    from ft_core.loop.inside_group import InsideGroup
    from ft_core.manager import Manager
    from ft_core.reduction.bucket_reducer import BucketReducer
    from ft_core.reduction.ddp_arguments import Inventory
    from ft_core.reduction.interface import ReducerHost


class GroupModel(DistributedDataParallel):
    """Averages gradients over all ranks of all groups.

    Args:
        manager: of this rank; None: as DistributedDataParallel.
        inside: the ranks of this group. All of them wrap the same models in the same order.
        module: the model.
        kwargs: of torch's DistributedDataParallel.
    """

    sharded = False

    def __init__(self, manager: Manager | None, inside: InsideGroup, module: nn.Module, **kwargs: Any) -> None:
        self._inside: InsideGroup | None = inside  # the base class makes the reducer
        super().__init__(manager, module, **kwargs)

    def _new_reducer(
        self, hooks: ReducerHost, module: nn.Module, inventory: Inventory, *, sync_buffers: bool
    ) -> BucketReducer:
        inside = self._inside
        if inside is None or inside.ranks == 1:
            return super()._new_reducer(hooks, module, inventory, sync_buffers=sync_buffers)
        inside.open()
        owners = inventory.buffer_owners if sync_buffers else ()
        return GroupReducer(hooks, module, inventory.trained, inventory.plan, inventory.devices, owners, inside)

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The module inside."""
        return (self.module,)

    @property
    def in_training_mode(self) -> bool:
        """Whether it is trained, as far as its mode says so."""
        return self.training

    def retire(self) -> None:
        """The run is over: autograd keeps hooks, and what they know, where nothing can collect it."""
        self.gradient_reducer.remove_hooks()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inside": None}
