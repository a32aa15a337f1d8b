"""The part of `_compat` about ModelParallelStrategy: its sizes, and the state of a sharded model in three forms.

How it works. As `_compat`. State of a model that FSDP2 shards is DTensors; each rank holds its part of each. What other
replicas receive is collected without communication, as modules and optimizers have it. A checkpoint has the names of
torch's distributed checkpoints in place of parameters' numbers (`parts_for_checkpoint`); where it is one file, the
leading group gathers the whole tensors on its first rank when it is written (`gathered`).

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ft_core.loop.job_checkpoint import keeping_none
from ft_lightning._compat import part

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    Strategy = Any
    Trainer = Any

SUPPORTED_PRECISION = ("32-true", "bf16-mixed", "bf16-true", "16-true")
"""Those of `_AcceleratorConnector._validate_precision_choice`, which asks only where a strategy object was passed."""
METADATA = ("meta.pt", ".metadata")
"""In the folder of a distributed checkpoint: Lightning's part, and torch's."""


def sizes(strategy: Strategy) -> tuple[Any, Any]:
    """The arguments data_parallel_size and tensor_parallel_size."""
    return strategy._data_parallel_size, strategy._tensor_parallel_size


def set_sizes(strategy: Strategy, data_parallel: int, tensor_parallel: int) -> None:
    """Have the mesh made so. Relies on `ModelParallelStrategy.setup_environment` using these two attributes."""
    strategy._data_parallel_size, strategy._tensor_parallel_size = data_parallel, tensor_parallel


def saves_folders(strategy: Strategy) -> bool:
    """The argument save_distributed_checkpoint."""
    return bool(strategy._save_distributed_checkpoint)


def share_path(trainer: Trainer, broadcast: Callable[[Any], Any]) -> None:
    """All ranks of a group resume from what its first rank found: loading is collective.

    With `ckpt_path="last"` each rank looks for itself, and a checkpoint may appear meanwhile. Relies on
    `_CheckpointConnector.restore` calling `resume_start(path, ...)` on all ranks, also where there is no path.
    """
    connector = trainer._checkpoint_connector
    start = type(connector).resume_start

    def resume_start(path: Any = None, *args: Any, **kwargs: Any) -> None:
        start(connector, broadcast(path), *args, **kwargs)

    connector.resume_start = resume_start


def no_longer_share_path(trainer: Trainer) -> None:
    """Undo what `share_path` did."""
    vars(trainer._checkpoint_connector).pop("resume_start", None)


# ---------------------------------------------------------------- the model


def roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules on which `fully_shard` was called."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in roots(child)]


def wraps_fsdp1(module: nn.Module) -> bool:
    """Some of it is wrapped in FullyShardedDataParallel."""
    return any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules())


# ---------------------------------------------------------------- state


def optimizer_of(optimizer: Any) -> torch.optim.Optimizer:
    """Torch's optimizer. Relies on `LightningOptimizer._optimizer`."""
    inner: torch.optim.Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner


def model_parts_for_checkpoint(module: nn.Module) -> dict[str, Any]:
    """The model's state with the names that checkpoints have. Nothing is copied or communicated."""
    return get_model_state_dict(module)


def optimizer_parts_for_checkpoint(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """An optimizer's state likewise. Torch makes it with a step of rate zero if there is none yet; not to stay."""
    inner = optimizer_of(optimizer)
    with keeping_none([inner]):
        return get_optimizer_state_dict(module, inner)


def load_parts(tree: str, strategy: Strategy, what: str, *args: Any, **kwargs: Any) -> None:
    """Call a method that Lightning's base class has and ModelParallelStrategy has made empty: it loads elsewhere.

    Relies on `Strategy.load_model_state_dict` and `Strategy.load_optimizer_state_dict`.
    """
    getattr(part(tree, "strategies.Strategy"), what)(strategy, *args, **kwargs)


def gathered(tree: str, checkpoint: dict[str, Any], module: nn.Module, *, first: bool) -> dict[str, Any]:
    """A checkpoint with whole tensors on the CPU of the first rank; on the others it is of no use. On all ranks.

    Relies on ModelParallelStrategy saving optimizer states by the parameters' numbers, as plain Lightning does, and on
    its `_align_compiled_param_names_with_module` (Lightning 2.6), for models with compiled parts.
    """

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor):
            full = value.full_tensor()
            return full.cpu() if first else None
        return value

    found = {name: tree_map(whole, value) for name, value in checkpoint.items()}
    if first:
        states = found.get("optimizer_states", [])
        found["optimizer_states"] = [by_number(tree, state, module) for state in states]
    return found


def by_number(tree: str, state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """An optimizer's state by the parameters' numbers instead of their names."""
    try:
        aligned = part(tree, "strategies.model_parallel._align_compiled_param_names_with_module")(state, module)
    except AttributeError:  # Lightning 2.5
        aligned = state
    numbered: dict[str, Any] = FullyShardedDataParallel.rekey_optim_state_dict(
        aligned, OptimStateKeyType.PARAM_ID, module
    )
    return numbered
