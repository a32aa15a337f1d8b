"""`ShardReducer`: the `BucketReducer` of this rank's shards of the roots that FSDP2 has sharded.

How it works. What differs from a model that is not sharded:
- FSDP2 reduces a root's own parameters in a callback at the end of backward. With several roots, that of one may come
  after ours, which was queued by the first gradient. So ours is queued once more if something is missing: then it runs
  after those of all roots, as these were queued while backward ran.
- Which backwards cross to the other groups is said as for torch's HSDP, by `set_requires_all_reduce`: without it
  reduce-scattered gradients accumulate on this rank. (After `set_requires_gradient_sync(False)` FSDP2 runs no hooks.)
- A forward need not be `forward`: `register_fsdp_forward_method` makes one of any method, and the modules' own hooks
  do not run then. So the first gradient of a step that no forward has announced asks whether it is to be averaged.
- After a forward without a backward (an evaluation) FSDP2 keeps the root's parameters whole, until somebody asks for
  the state. Which ranks of a group are asked by other replicas, and when, differs: then one rank would gather them in
  its next forward, and the other not. So each step begins with shards.

Invariants and threads: as the base class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from ft_core.reduction.autograd import queue_callback
from ft_core.reduction.bucket_reducer import BucketReducer
from ft_core.reduction.sharded.fsdp_groups import groups_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from ft_core.reduction.interface import ReducerHost, ReductionAttempt
    from ft_core.reduction.sharded.inventory import ShardInventory


class ShardReducer(BucketReducer):
    """The reducer of all `roots`, which are one model.

    Args:
        manager: of this rank.
        roots: the modules.
        shards: what of them is reduced.
        unannounced: called in a backward that no forward of the roots has announced; whether its gradients are to be
            averaged.
    """

    def __init__(
        self,
        manager: ReducerHost,
        roots: Sequence[nn.Module],
        shards: ShardInventory,
        unannounced: Callable[[], bool] = lambda: True,
    ) -> None:
        self._roots = list(roots)
        self._sharded = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
        self._queued_again = self._announced = False
        self._unannounced = unannounced
        groups = (_first_group(root) for root in roots)
        self._groups = [group for group in groups if group is not None]
        """One of FSDP2's parameter groups of each root: its settings are all groups'."""
        super().__init__(manager, roots[0], shards.trained, shards.plan, shards.devices, shards.owners)

    @property
    def crosses(self) -> bool:
        """Gradients of a backward now are averaged over the groups."""
        return all(group.all_reduce_grads for group in self._groups)

    def step_opens(self) -> None:
        """Go back to shards, on all ranks alike."""
        self._announced = False
        for module in self._sharded:
            module.reshard()

    def before_forward(self, *, sync: bool) -> None:
        """As the base's."""
        self._announced = True
        super().before_forward(sync=sync)

    def before_backward(self, *, sync: bool) -> None:
        """As the base's."""
        self._announced = True
        super().before_backward(sync=sync)

    def _begin(self) -> bool:
        if not self.crosses:
            return False
        if not self._announced:
            self.before_backward(sync=self._unannounced())
        return super()._begin()

    def _start(self, attempt: ReductionAttempt) -> bool:
        self._queued_again = False
        return super()._start(attempt)

    def _end_of_backward(self) -> None:
        unfinished = self._open and not self._broken and self._next < self._bucket_count
        if unfinished and not self._queued_again:
            self._queued_again = True
            queue_callback(self._end_of_backward)
            return
        super()._end_of_backward()

    def buffer_storages(self) -> set[int]:
        """Addresses of the storages of all buffers of all roots."""
        return {buffer.untyped_storage().data_ptr() for root in self._roots for buffer in root.buffers()}


def _first_group(root: nn.Module) -> Any:
    for module in root.modules():
        for group in groups_of(module):
            return group
    return None
