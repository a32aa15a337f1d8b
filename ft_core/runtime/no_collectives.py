"""Recognises state functions that communicate inside the group, before they are waited for in vain.

How it works. The ranks of a group collect their state at different moments: whoever is healed, or joins, decides when.
A function that gathers a whole model from shards (`full_tensor`, `get_model_state_dict` with full_state_dict) would
wait for ranks that are elsewhere. torch dispatches every collective as an operator, so a dispatch mode sees the first.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from ft_core.checkpointing.sharded_state import is_sharded
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})


class NoCollectives(TorchDispatchMode):
    """Inside, a collective raises ConfigError. `key`: of the state function that is called."""

    def __init__(self, key: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key = key

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse the operators of torch.distributed; what is done to a DTensor becomes operators on its shard."""
        if func.namespace in NAMESPACES:
            raise ConfigError(
                f"the state function {self._key!r} communicates inside the group ({func.__name__}): the ranks call it "
                "at different moments, so it would wait for ever. Return what this rank holds: module.state_dict() "
                "and optimizer.state_dict() as they are, which are sent shard by shard, instead of full_tensor() or "
                "get_model_state_dict(full_state_dict=True)"
            )
        if any(is_sharded(arg) for arg in args):
            return NotImplemented
        return func(*args, **(kwargs or {}))
