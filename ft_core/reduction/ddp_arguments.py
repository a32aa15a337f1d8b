"""What of a module is reduced, and whether it can be: the arguments of DistributedDataParallel, checked and sorted.

Runs once, at construction. The outcome is an `Inventory`: the parameters and buffers in module order, their specs, and
the bucket plan made from these. Every refusal is a ConfigError that names the argument or the parameter and the way
out.
Invariant: the specs depend on the module and the arguments only, so that all replicas have the same plan.
Threads: none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ft_core.errors import ConfigError
from ft_core.reduction.bucket_plan import BucketPlan, BucketSettings, TensorSpec, plan_buckets
from ft_core.reduction.interface import FENCE_SLOTS
from ft_core.strides import dense_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
DEFAULT_CAPS_BYTES = (1 * MIB, 25 * MIB)
"""Sizes as in torch's DDP: a small first bucket, so that reduction starts early in backward."""

_MOOT: dict[str, str] = {
    "dim": "inputs are not scattered; there is one device per process",
    "init_sync": "the Manager brings all replicas to one state before the first commit (Manager's init_sync)",
    "check_reduction": "deprecated in torch; the reduction is always completed",
    "gradient_as_bucket_view": "gradients are always views of the buckets",
    "static_graph": "no graph is walked and buckets are never rebuilt",
    "batched_grad_copy": "gradients are copied and scaled in one pass as they arrive",
}
"""Arguments of torch's DDP that are accepted and change nothing, and why."""

IMPOSSIBLE: dict[str, str] = {
    "process_group": "the group belongs to the Manager: pass it there",
    "device_mesh": "the group belongs to the Manager; shard inside a replica group with FSDP2 instead",
    "mixed_precision": "use torch.autocast, or cast the module before wrapping it",
    "delay_all_reduce_named_params": "all gradients are reduced in backward",
    "param_to_hook_all_reduce": "all gradients are reduced in backward",
    "skip_all_reduce_unused_params": "the plan must not depend on use; gradients that nobody has stay None as it is",
}
"""Arguments of torch's DDP that can't be honoured, and what to do. None and False are accepted."""

_FUNCTIONAL = frozenset(
    {
        "device_ids",
        "output_device",
        "bucket_cap_mb",
        "bucket_cap_mb_list",
        "broadcast_buffers",
        "forward_sync_buffers",
        "find_unused_parameters",
    }
)


@dataclass(frozen=True)
class Options:
    """The arguments that have an effect."""

    device_ids: Sequence[Any] | None
    output_device: Any
    sync_buffers: bool
    may_freeze: bool
    """`find_unused_parameters=True`: parameters may be frozen later, which makes them unused ones."""
    buckets: BucketSettings


def known_arguments() -> frozenset[str]:
    """Names of torch's DDP that `check_arguments` has an answer to."""
    return frozenset((*IMPOSSIBLE, *_MOOT, *_FUNCTIONAL))


def check_arguments(kwargs: dict[str, object]) -> Options:
    """Sort the arguments of torch's DDP into effective, moot and impossible ones."""
    for name, value in kwargs.items():
        if name in IMPOSSIBLE:
            if value is not None and value is not False:
                raise ConfigError(f"DistributedDataParallel: {name}={value!r} cannot be used: {IMPOSSIBLE[name]}")
        elif name not in _MOOT and name not in _FUNCTIONAL:
            raise ConfigError(f"DistributedDataParallel got an unknown argument: {name}")
    device_ids = kwargs.get("device_ids")
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise ConfigError(f"DistributedDataParallel: device_ids must be None or a list, got {device_ids!r}")
    sync = kwargs.get("forward_sync_buffers")
    if sync is None:
        sync = kwargs.get("broadcast_buffers")
    sync_buffers = sync is None or bool(sync)
    find_unused = kwargs.get("find_unused_parameters")
    settings = BucketSettings(
        caps_bytes=_caps_bytes(kwargs.get("bucket_cap_mb"), kwargs.get("bucket_cap_mb_list")),
        find_unused=find_unused is None or bool(find_unused),
        broadcast_buffers=sync_buffers,
    )
    return Options(device_ids, kwargs.get("output_device"), sync_buffers, bool(find_unused), settings)


def _caps_bytes(cap_mb: object, caps_mb: object) -> tuple[int, ...]:
    if caps_mb:
        name, values = "bucket_cap_mb_list", caps_mb
    elif cap_mb is not None:
        name, values = "bucket_cap_mb", [cap_mb]
    else:
        return DEFAULT_CAPS_BYTES
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, (int, float)) and v > 0 for v in values):
        raise ConfigError(f"DistributedDataParallel: {name} must be positive (MiB), got {values!r}")
    return tuple(max(1, int(value * MIB)) for value in values)


@dataclass(frozen=True)
class Inventory:
    """What of a module is reduced, and how."""

    trained: list[nn.Parameter]
    frozen: list[nn.Parameter]
    ignored: set[str]
    devices: list[torch.device]
    buffer_owners: list[list[tuple[nn.Module, str]]]
    """The modules that have each buffer, and its name there."""
    buffers: list[TensorSpec]
    parameters: list[TensorSpec]
    settings: BucketSettings

    @functools.cached_property
    def plan(self) -> BucketPlan:
        """The plan all replicas must share."""
        return plan_buckets(self.parameters, self.buffers, self.settings, FENCE_SLOTS)


def take_inventory(module: nn.Module, options: Options) -> Inventory:
    """Collect what of `module` is reduced; refuse what can't be."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    sparse = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    trained: list[nn.Parameter] = []
    frozen: list[nn.Parameter] = []
    devices: list[torch.device] = []
    specs: list[TensorSpec] = []
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        _check_parameter(name, parameter, is_sparse=id(parameter) in sparse)
        (trained if parameter.requires_grad else frozen).append(parameter)
        if parameter.requires_grad and parameter.device not in devices:
            devices.append(parameter.device)
        specs.append(_spec(name, parameter, devices))
    if not trained:
        raise ConfigError(
            f"DistributedDataParallel: {type(module).__name__} has no parameter that requires a gradient, so there is "
            "nothing to reduce: use it without the wrapper"
        )
    owners: list[list[tuple[nn.Module, str]]] = []
    buffers: list[TensorSpec] = []
    if options.sync_buffers:
        for name, found_at, buffer in named_buffers(module):
            if name not in ignored:
                owners.append(found_at)
                buffers.append(_spec(name, buffer, devices))
    return Inventory(trained, frozen, ignored, devices, owners, buffers, specs, options.buckets)


def named_buffers(module: nn.Module) -> list[tuple[str, list[tuple[nn.Module, str]], Tensor]]:
    """Each buffer that can change once, under its first name: (name, the modules that have it, the buffer)."""
    found: dict[int, tuple[str, list[tuple[nn.Module, str]], Tensor]] = {}
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(buffer), (name, [], buffer))[1].append((owner, key))
    # One element at several places cannot be changed in place, so forward does not change it either.
    return [one for one in found.values() if torch._debug_has_internal_overlap(one[2]) != 1]


def _check_parameter(name: str, parameter: nn.Parameter, *, is_sparse: bool) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(f"parameter {name} is not initialized (lazy module): run one forward pass before wrapping")
    if parameter.is_meta:
        raise ConfigError(f"parameter {name} is on the meta device: materialize it (module.to_empty) before wrapping")
    if parameter.requires_grad and (is_sparse or parameter.layout != torch.strided):
        raise ConfigError(f"parameter {name} has sparse gradients, which cannot be reduced: use sparse=False")


def _spec(name: str, tensor: Tensor, devices: list[torch.device]) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        itemsize_bytes=tensor.element_size(),
        strides=dense_strides(tensor) if tensor.requires_grad else None,
        device=devices.index(tensor.device) if tensor.requires_grad else 0,
        trained=tensor.requires_grad if isinstance(tensor, nn.Parameter) else True,
    )


def check_devices(options: Options, inventory: Inventory) -> list[torch.device] | None:
    """The device that inputs are moved to, as a list of one; None if the caller places them."""
    types = sorted({device.type for device in inventory.devices})
    if len(types) != 1:
        raise ConfigError(
            f"DistributedDataParallel: parameters are on devices of several types: {', '.join(types)}; put the whole "
            f"model on one, for instance with model.to({str(inventory.devices[-1])!r})"
        )
    given = list(options.device_ids or ())
    if len(given) > 1:
        raise ConfigError(f"DistributedDataParallel: device_ids may hold one device (one process each), got {given}")
    if not given:
        if options.output_device is not None:
            raise ConfigError("DistributedDataParallel: output_device needs device_ids")
        return None
    if types == ["cpu"] or len(inventory.devices) > 1:
        places = ", ".join(map(str, inventory.devices))
        raise ConfigError(f"DistributedDataParallel: device_ids={given} must be None for a module on {places}")
    device = inventory.devices[0]
    for name, value in (("device_ids", given[0]), ("output_device", options.output_device)):
        if value is not None and _as_device(value, device.type) != device:
            raise ConfigError(f"DistributedDataParallel: {name}={value!r}, but the module is on {device}")
    return [device]


def _as_device(value: Any, device_type: str) -> torch.device:
    device = torch.device(device_type, value) if isinstance(value, int) else torch.device(value)
    if device.index is None and device.type != "cpu":
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device
