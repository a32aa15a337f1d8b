"""`TrainedModel`: what a training run asks of a model that it trains, whole on each rank or sharded in the group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from ft_core.reduction.bucket_reducer import BucketReducer


class TrainedModel(Protocol):
    """A model of a training run: `GroupModel` or `sharded_model.ShardedModel`."""

    broadcast_buffers: bool
    sharded: bool
    """Each rank of the group holds a part of it."""

    @property
    def gradient_reducer(self) -> BucketReducer:
        """What averages its gradients over the groups."""
        ...

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules as the script had them."""
        ...

    @property
    def in_training_mode(self) -> bool:
        """Whether it is trained, as far as its mode says so."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """All of them."""
        ...

    def buffers(self) -> Iterable[Tensor]:
        """All of them."""
        ...

    def retire(self) -> None:
        """The run is over: keep nothing where autograd would hold it for ever."""
        ...

    def unwrap(self) -> object:
        """It is trained no more: its gradients stay on this rank, or inside the group."""
        ...
