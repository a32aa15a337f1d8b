"""What cannot be used with `strategy="fault_tolerant_fsdp2"`: arguments, sizes, precisions, models; and what to do.

How it works. Each function refuses one kind of mistake where it shows first: arguments in the constructor, sizes and
precision when the Trainer is made, the model in `fit`, before anything is communicated with the other groups.

Threads: pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError
from ft_lightning._compat import callbacks, model_parallel
from ft_lightning.arguments import DDP_ONLY, check_known
from ft_lightning.names import FSDP2, NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

NOT_HERE = f"cannot be used with strategy={FSDP2!r}"
_SHARD = "this strategy is for FSDP2: shard the model in configure_model, with fully_shard(module, "
_REPLICATE = (
    "replicas of the model are the replica groups, which may fail one by one: start more of them (ftrun --replicas N), "
    "and shard over self.device_mesh['data_parallel'] inside each"
)
REFUSED = {
    **DDP_ONLY,
    "find_unused_parameters": "parameters that no replica used are found in every step; leave it out",
    "static_graph": "buckets of shards are laid out once and for all; leave it out",
    "broadcast_buffers": "buffers follow the first rank of the first participant at each commit; leave it out",
    "gradient_as_bucket_view": "gradients are views of the buckets; leave it out",
    "on_exhausted": "the loaders of a group's ranks end together; leave it out, or use elastic_data=True",
    "ftrun_options": "a launcher starts the ranks of each group; pass them to ftrun itself",
    "sharding_strategy": f"it is FSDP1's. {_REPLICATE}",
    "device_mesh": f"the strategy makes it of data_parallel_size and tensor_parallel_size. {_REPLICATE}",
    "auto_wrap_policy": f"it is FSDP1's; {_SHARD}mesh=self.device_mesh['data_parallel'])",
    "mixed_precision": f"it is FSDP1's; {_SHARD}mp_policy=MixedPrecisionPolicy(...)), or Trainer(precision=)",
    "cpu_offload": f"it is FSDP1's; {_SHARD}offload_policy=CPUOffloadPolicy())",
    "activation_checkpointing": "it is FSDP1's; wrap modules in configure_model, with checkpoint_wrapper of torch",
    "activation_checkpointing_policy": "it is FSDP1's; wrap modules in configure_model, with checkpoint_wrapper of "
    "torch",
    "state_dict_type": "it is FSDP1's; use save_distributed_checkpoint=True (a folder, each rank writes its shards) or "
    "False (one file)",
    "data_parallel_replicate_size": _REPLICATE,
}
"""Arguments of DDP's and FSDP1's strategies, and why they mean nothing here."""
MAX_MB = float("inf")
COPYING = ("StochasticWeightAveraging", "WeightAveraging", "ModelPruning", "BaseFinetuning")
"""Callbacks that copy the module, or exchange or thaw its parameters."""


def check_arguments(kwargs: Mapping[str, Any], strategy: type) -> None:
    """Refuse arguments that are not this strategy's. Raises ConfigError."""
    check_known(kwargs, strategy, REFUSED)
    for name, value in kwargs.items():
        raise ConfigError(f"{name}={value!r} {NOT_HERE}: {REFUSED[name]}")


def check_size(name: str, value: object) -> None:
    """One of the two sizes of the mesh. Raises ConfigError."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value != "auto" and not whole:
        raise ConfigError(f"{name}={value!r} must be 'auto' or a whole number, 1 or more")


def check_bucket_cap(value: object) -> None:
    """The argument bucket_cap_mb. Raises ConfigError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_MB):
        raise ConfigError(f"bucket_cap_mb={value!r} must be a number of MiB, more than 0")


def mesh_sizes(data_parallel: int | str, tensor_parallel: int | str, ranks: int) -> tuple[int, int]:
    """The two sizes of the mesh of a replica group of `ranks` processes.

    Raises:
        ConfigError: they do not make the number of ranks.
    """
    tensor = 1 if isinstance(tensor_parallel, str) else tensor_parallel
    data = max(1, ranks // tensor) if isinstance(data_parallel, str) else data_parallel
    if data * tensor != ranks:
        raise ConfigError(
            f"data_parallel_size={data_parallel!r} and tensor_parallel_size={tensor_parallel!r} make a mesh of "
            f"{data} x {tensor}, but this replica group has {ranks} rank{'s' * (ranks > 1)}: the mesh is that of one "
            f"group; start {data * tensor} per group (ftrun --nproc-per-replica {data * tensor}), or leave "
            "data_parallel_size out, which is the rest then"
        )
    return data, tensor


def check_precision(precision: str) -> None:
    """Lightning's own rule for ModelParallelStrategy. Raises ConfigError."""
    if precision not in model_parallel.SUPPORTED_PRECISION:
        known = ", ".join(map(repr, model_parallel.SUPPORTED_PRECISION))
        raise ConfigError(f"precision={precision!r} {NOT_HERE}, as with ModelParallelStrategy: choose one of {known}")


def check_model(module: nn.Module) -> None:
    """The model as `configure_model` has left it.

    Raises:
        ConfigError: it is not sharded, or not as a whole, or by FSDP1.
    """
    name = type(module).__name__
    if model_parallel.wraps_fsdp1(module):
        raise ConfigError(
            f"{name} has modules in FullyShardedDataParallel (FSDP1), which {NOT_HERE}: call "
            "torch.distributed.fsdp.fully_shard on them in configure_model instead"
        )
    roots = model_parallel.roots(module)
    if not roots:
        raise ConfigError(
            f"{name} is not sharded: strategy={FSDP2!r} needs {name}.configure_model() to call "
            "torch.distributed.fsdp.fully_shard(module, mesh=self.device_mesh['data_parallel']) on its modules; for "
            f"models that each rank can hold use strategy={NAME!r}"
        )
    sharded = {id(parameter) for root in roots for parameter in root.parameters()}
    for path, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in sharded:
            raise ConfigError(
                f"parameter {path} is trained and not sharded, so nobody averages its gradient: call fully_shard in "
                "configure_model on a module that has it, or freeze it (requires_grad_(False))"
            )


def check_trainer(trainer: Any) -> None:
    """Refuse callbacks that a sharded model does not go with. Raises ConfigError."""
    for name in COPYING:
        if callbacks.has(trainer, name):
            raise ConfigError(
                f"the callback {name} {NOT_HERE}: it copies the module or changes which parameters are trained, and "
                "sharded modules cannot be copied or changed; leave it out"
            )


def check_elastic(tensor_parallel: int, roots: int) -> None:
    """Refuse what elastic data does not go with. Raises ConfigError."""
    if tensor_parallel > 1:
        raise ConfigError(
            f"elastic data with tensor_parallel_size={tensor_parallel}: it gives each rank samples of its own, and the "
            "ranks of a tensor-parallel group need the same; leave one of them out"
        )
    if roots > 1:
        raise ConfigError(
            f"elastic data with {roots} modules that are sharded side by side: losses are weighted where they leave "
            "the sharded model, which has to be one; call fully_shard on a module around them, too"
        )
