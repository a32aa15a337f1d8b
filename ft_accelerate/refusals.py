"""Refusals of what Accelerate can do and fault-tolerant training cannot, before anything is started.

Threads: the training thread.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from ft_accelerate import _compat
from ft_core.errors import ConfigError, NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger("ft_accelerate")
REDUCES = "{} reduces the gradients itself"
ARGUMENTS = {
    "deepspeed_plugin": REDUCES.format("DeepSpeed"),
    "deepspeed_plugins": REDUCES.format("DeepSpeed"),
    "megatron_lm_plugin": REDUCES.format("Megatron-LM"),
}
"""Arguments of Accelerator that must be left out, and why."""
VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": REDUCES.format("DeepSpeed"),
    "ACCELERATE_USE_MEGATRON_LM": REDUCES.format("Megatron-LM"),
}
"""Variables by which `accelerate launch` switches on what cannot work."""
MODEL_PARALLEL = ("tp_size", "cp_size", "sp_size")
"""Sizes of a ParallelismConfig over whose processes a batch, or the model's computation, is divided."""
REMEDY = "leave it out, or switch fault tolerance off (ACCELERATE_FT_ENABLED=0)"


def check_arguments(given: Mapping[str, Any], sharding: Any = None) -> None:
    """Before the Accelerator is built.

    Args:
        given: its arguments by name.
        sharding: the FullyShardedDataParallelPlugin in force; None: no FSDP.

    Raises:
        ConfigError: one of them, or a variable of the launcher, cannot be used.
        NotAvailableError: it comes with a later version.
    """
    for name, why in ARGUMENTS.items():
        if given.get(name) is not None:
            raise _refusal(f"{name}=", why)
    for name, why in VARIABLES.items():
        if _compat.flag(name):
            raise _refusal(f"{name}=true", why)
    if given.get("torch_tp_plugin") is not None:
        raise NotAvailableError(_text("torch_tp_plugin=", "tensor parallelism in a replica group is not supported yet"))
    check_version(sharding)
    check_parallelism(_compat.parallelism_in_force(given), sharding, _processes())
    for handler in given.get("kwargs_handlers") or ():
        if isinstance(handler, _compat.DistributedDataParallelKwargs):
            check_hook(handler)


def _text(what: str, why: str) -> str:
    return f"{what} cannot be used with fault tolerance: {why}; {REMEDY}"


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(_text(what, why))


def check_version(sharding: Any) -> None:
    """FSDP of version 2 only.

    Raises:
        ConfigError: it is version 1.
    """
    version = None if sharding is None else sharding.fsdp_version
    if version not in (None, 2):
        raise ConfigError(
            f"fsdp_version={version} cannot be used with fault tolerance: FSDP1 flattens parameters and reduces their "
            "gradients where the other replica groups cannot be asked. Use FSDP2: "
            "FullyShardedDataParallelPlugin(fsdp_version=2), `fsdp_version: 2` in the fsdp_config of the config file, "
            "--fsdp_version 2, or FSDP_VERSION=2 (`accelerate to-fsdp2` converts a config file)"
        )


def _processes() -> int | None:
    """Of this group, where a launcher says it as torchrun does."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else None


def check_parallelism(config: Any, sharding: Any, processes: int | None) -> None:
    """A ParallelismConfig may say no more than that FSDP2 shards over all processes of the group.

    Args:
        config: in force; None: there is none.
        sharding: the FullyShardedDataParallelPlugin in force; None: no FSDP.
        processes: of this group; None: not known yet.

    Raises:
        ConfigError: it replicates the model inside the group, shards without FSDP, or over another number of processes.
        NotAvailableError: it divides a batch, or the model's computation.
    """
    if config is None:
        return
    if config.dp_replicate_size > 1:
        raise ConfigError(
            f"ParallelismConfig(dp_replicate_size={config.dp_replicate_size}) cannot be used with fault tolerance: "
            "replicas of the model are the replica groups, which survive each other's loss. Leave dp_replicate_size "
            f"out, start {config.dp_replicate_size} times as many groups (--ft_replicas), and give dp_shard_size the "
            "number of processes of one group"
        )
    for name in MODEL_PARALLEL:
        size = getattr(config, name, 1)
        if size > 1:
            raise NotAvailableError(
                _text(
                    f"ParallelismConfig({name}={size})",
                    "tensor, context and sequence parallelism in a replica group are not supported yet",
                )
            )
    if config.dp_shard_size > 1 and sharding is None:
        raise ConfigError(
            f"ParallelismConfig(dp_shard_size={config.dp_shard_size}) without FSDP shards nothing: pass "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), too"
        )
    if processes is not None and config.dp_shard_size not in (1, processes):
        raise ConfigError(
            f"ParallelismConfig(dp_shard_size={config.dp_shard_size}), but this replica group has {processes} "
            f"process{'es' * (processes != 1)}: each group shards one copy of the model over all its processes. Start "
            f"{config.dp_shard_size} per group (--num_processes {config.dp_shard_size}, or ftrun --nproc-per-replica "
            f"{config.dp_shard_size}), or leave dp_shard_size out"
        )


def check_hook(handler: Any) -> None:
    """Communication hooks of torch's DDP.

    Raises:
        ConfigError: one is asked for.
    """
    hook = getattr(handler.comm_hook, "value", handler.comm_hook)
    if hook != "no":
        raise ConfigError(
            f"DistributedDataParallelKwargs(comm_hook={hook!r}) cannot be used with fault tolerance: gradients are "
            "averaged by the Manager, over the groups that take part in the step; leave it out"
        )


def check_state(state: Any) -> None:
    """Once Accelerate knows where it runs.

    Raises:
        ConfigError: on a TPU, or with a backend that shards or reduces by itself.
    """
    kind = state.distributed_type
    if kind == _compat.DistributedType.XLA:
        raise ConfigError(f"a TPU (XLA) cannot be used with fault tolerance: it has no process groups; {REMEDY}")
    known = ("NO", "FSDP", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU")
    if str(getattr(kind, "value", kind)) not in (*known, "MULTI_SDAA", "MULTI_NEURON"):
        raise ConfigError(f"distributed_type={kind} cannot be used with fault tolerance; {REMEDY}")


def check_groups(group: int, expected: int | None) -> None:
    """Refuse a group number that cannot be.

    Raises:
        ConfigError: there are fewer groups than its number says.
    """
    if expected is not None and group >= expected:
        raise ConfigError(
            f"replica_group={group} with expected_replicas={expected}: groups are numbered from 0 to {expected - 1}"
        )


def check_sharing(share_evaluation: bool | None, dispatch_batches: bool | None) -> None:
    """Evaluation data that the groups are to share must be read by index.

    Raises:
        ConfigError: one process of each group would read it for the others.
    """
    if share_evaluation and dispatch_batches:
        raise ConfigError(
            "share_evaluation=True cannot be used with dispatch_batches=True: the groups divide evaluation data by its "
            "index, which the process that reads for the others of its group does not have; leave out one of them"
        )


def check_whole(model: Any) -> None:
    """A model that each process of the group is to hold whole.

    Raises:
        ConfigError: it has sharded parameters.
    """
    module = sys.modules.get("torch.distributed.tensor")  # half a second, which is only for those who shard
    if module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters()):
        raise ConfigError(
            f"prepare({type(model).__name__}): the model is sharded already (fully_shard, from_pretrained with "
            "distributed_config), and this Accelerator was made without FSDP, so it would take it for a whole one. "
            "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), and the whole model"
        )


def check_owners(models: Sequence[Any], optimizers: Sequence[Any]) -> bool:
    """After a backward: that a step will follow which the groups make together. A warning if not.

    No error: gradients may be wanted for themselves.

    Args:
        models: prepared, to be trained.
        optimizers: prepared.

    Returns:
        Whether anything could be told.
    """
    if not models:
        log.warning(
            "backward(), but no model with parameters to train was given to accelerator.prepare(): each replica group "
            "trains its own, apart from the others. Prepare the model and its optimizer"
        )
        return True
    got = [p for model in models for p in model.parameters() if p.requires_grad and p.grad is not None]
    mine = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if got and not any(id(p) in mine for p in got):
        have = f"{len(optimizers)} optimizers were" if len(optimizers) != 1 else "one optimizer was"
        log.warning(
            "backward() made gradients for %d parameters, and no prepared optimizer has any of them (%s given to "
            "accelerator.prepare()): the steps of another one are not agreed on with the other replica groups, which "
            "part from this one with the first failure. Prepare the optimizer, with the model's own parameters",
            len(got), have,
        )  # fmt: skip
    return bool(got)
