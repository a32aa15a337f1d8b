"""`groups_of`: what FSDP2 keeps of a module that `fully_shard` was called on. The one place that knows where that is.

Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def groups_of(module: nn.Module) -> Sequence[Any]:
    """The parameter groups of `module`; none if it is not sharded itself, or has no parameter of its own."""
    if not isinstance(module, FSDPModule):
        return ()
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = state._fsdp_param_group  # torch before 2.12 has one
    return () if group is None else (group,)
