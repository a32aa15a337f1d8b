"""Refusals of what Accelerate can do and fault-tolerant training cannot, before anything is started.

Threads: the training thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ft_accelerate import _compat
from ft_core.errors import ConfigError, NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger("ft_accelerate")
SHARDS = "a replica group must hold a whole copy of the model on each of its processes in this version"
ARGUMENTS = {
    "deepspeed_plugin": "DeepSpeed reduces the gradients itself",
    "deepspeed_plugins": "DeepSpeed reduces the gradients itself",
    "megatron_lm_plugin": "Megatron-LM reduces the gradients itself",
    "fsdp_plugin": SHARDS,
    "torch_tp_plugin": SHARDS,
    "parallelism_config": SHARDS,
}
"""Arguments of Accelerator that must be left out, and why."""
VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed reduces the gradients itself",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM reduces the gradients itself",
    "ACCELERATE_USE_FSDP": SHARDS,
    "ACCELERATE_USE_PARALLELISM_CONFIG": SHARDS,
}
"""Variables by which `accelerate launch` switches on what cannot work."""
REMEDY = "leave it out, or switch fault tolerance off (ACCELERATE_FT_ENABLED=0)"


def check_arguments(given: Mapping[str, Any]) -> None:
    """Before the Accelerator is built.

    Args:
        given: its arguments by name.

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
    for handler in given.get("kwargs_handlers") or ():
        if isinstance(handler, _compat.DistributedDataParallelKwargs):
            check_hook(handler)


def _refusal(what: str, why: str) -> ConfigError | NotAvailableError:
    kind = NotAvailableError if why is SHARDS else ConfigError
    return kind(f"{what} cannot be used with fault tolerance: {why}; {REMEDY}")


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
    known = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU")
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
