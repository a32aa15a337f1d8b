"""What of sharded models is reduced over the replica groups; what cannot be is refused.

How it works. FSDP2 has reduced gradients inside the group, so only this rank's shards travel, from each rank to its
like in the other groups. The layout of the whole is described (global shape, mesh, placements), in the same lines on
all ranks of all groups, so that groups that shard differently do not meet.

Threads: the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor

from ft_core.errors import ConfigError
from ft_core.reduction.bucket_plan import BucketPlan, BucketSettings, TensorSpec, plan_buckets
from ft_core.reduction.ddp_arguments import named_buffers
from ft_core.reduction.interface import FENCE_SLOTS
from ft_core.reduction.sharded.fsdp_groups import groups_of
from ft_core.reduction.sharded.parameter import ShardedParameter, local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclass(frozen=True)
class ShardPlan(BucketPlan):
    """The plan of one rank's shards. Its digest and its lines are about the whole: equal on all ranks of all groups."""

    layout: tuple[str, ...] = ()
    averages_over_ranks = True

    def describe(self) -> list[str]:
        """One line per parameter with its sharding, then per buffer, then the settings."""
        return [*self.layout, *super().describe()[len(self.parameters) :]]

    @cached_property
    def digest(self) -> int:
        """64 bits (unsigned) that are equal on all ranks where the layouts of the whole are."""
        return int.from_bytes(blake2b("\n".join(self.describe()).encode(), digest_size=8).digest(), "big")


@dataclass
class ShardInventory:
    """The shards of one rank."""

    trained: list[ShardedParameter]
    owners: list[list[tuple[nn.Module, str]]]
    """The modules that have each buffer, and its name there."""
    devices: list[torch.device]
    plan: BucketPlan


def take_shards(roots: Sequence[nn.Module], settings: BucketSettings, ranks: int) -> ShardInventory:
    """Collect what of `roots` is reduced.

    Args:
        roots: modules on which `fully_shard` was called last.
        settings: of the buckets.
        ranks: of this replica group.

    Raises:
        ConfigError: a module is not sharded, or a parameter of it, or over other processes than those of the group.
    """
    trained: list[ShardedParameter] = []
    specs: list[TensorSpec] = []
    layout: list[str] = []
    devices: list[torch.device] = []
    buffers: list[TensorSpec] = []
    owners: list[list[tuple[nn.Module, str]]] = []
    meshes: set[Any] = set()
    for number, root in enumerate(roots):
        if not isinstance(root, FSDPModule):
            raise ConfigError(
                f"replicate({type(root).__name__}): the module is not sharded; call torch's fully_shard(module) on it "
                "first (models that are not sharded belong into ft_core.DistributedDataParallel)"
            )
        _check_replicas(root)
        prefix = "" if len(roots) == 1 else f"{number}."
        for name, parameter in root.named_parameters():
            _check(prefix + name, parameter, ranks)
            if not isinstance(parameter, DTensor):
                continue  # frozen, and whole on every rank
            meshes.add(parameter.device_mesh)
            if parameter.requires_grad:
                trained.append(ShardedParameter(parameter))
                if trained[-1].device not in devices:
                    devices.append(trained[-1].device)
            spec = _spec(prefix + name, parameter, devices)
            specs.append(spec)
            layout.append(f"{replace(spec, shape=tuple(parameter.shape))} {_sharding(parameter)}")
        for name, found, buffer in named_buffers(root) if settings.broadcast_buffers else ():
            owners.append(found)
            buffers.append(replace(_spec(prefix + name, buffer, devices), trained=True))
    if not trained:
        raise ConfigError("replicate: no parameter requires a gradient, so there is nothing to reduce")
    _check_covered(meshes)
    plan = plan_buckets(specs, buffers, settings, FENCE_SLOTS)
    whole = ShardPlan(plan.parameters, plan.buffers, plan.settings, plan.buckets, plan.tail, tuple(layout))
    return ShardInventory(trained, owners, devices, whole)


def _check(name: str, parameter: nn.Parameter, ranks: int) -> None:
    if parameter.is_meta:
        raise ConfigError(
            f"parameter {name} is on the meta device: materialize it (module.to_empty, then its initial values) before "
            "replicate"
        )
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad:
            raise ConfigError(
                f"parameter {name} is trained and not sharded (ignored_params, or added after fully_shard), so nobody "
                "averages its gradient inside the group: call fully_shard on a module that has it, or freeze it"
            )
        return
    whole = _root(parameter.device_mesh)
    if whole.size() != ranks:
        raise ConfigError(
            f"parameter {name} is sharded on a mesh of {whole.size()} processes, and this replica group has {ranks} "
            "(world_size): the mesh must be of all processes of the group, and of no others; replicas are the groups' "
            "business, so leave a mesh dimension for them out"
        )


def _check_covered(meshes: set[Any]) -> None:
    """Refuse a dimension of the group's mesh along which nothing is sharded.

    Told by ranks, not by names: a mesh may be a slice of the whole one, or several of its dimensions made into one.
    """
    whole = _root(next(iter(meshes)))
    places = [torch.isin(whole.mesh, mesh.mesh).nonzero() for mesh in meshes]
    for dimension, size in enumerate(whole.mesh.shape):
        if size > 1 and all(len(place[:, dimension].unique()) == 1 for place in places):
            name = (whole.mesh_dim_names or range(whole.ndim))[dimension]
            raise ConfigError(
                f"no parameter is sharded over mesh dimension {name!r}, so its ranks hold copies, and nobody averages "
                "their gradients: make a mesh without it; replicas are the groups' business"
            )


def _root(mesh: Any) -> Any:
    """The mesh of which `mesh` is a part, as the tensor parallel part is of a 2-D mesh."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is None:  # torch before 2.9
        from torch.distributed.device_mesh import _mesh_resources

        return _mesh_resources.get_root_mesh(mesh)
    return find()


def _check_replicas(root: nn.Module) -> None:
    """Refuse torch's HSDP: its replicas live and die together."""
    for path, module in root.named_modules():
        groups = groups_of(module)
        for group in groups:
            # Of a mesh of one dimension FSDP2 has no replicas, and DDPMeshInfo is what has some.
            replicas = group.mesh_info.replicate_mesh_size if isinstance(group.mesh_info, DDPMeshInfo) else 1
            if replicas > 1:
                name, mesh = path or type(root).__name__, tuple(group.mesh_info.mesh.shape)
                raise ConfigError(
                    f"fully_shard({name}, mesh={mesh}): a replicate dimension of {replicas} inside the replica group, "
                    f"whose replicas cannot fail one by one: start {replicas} times as many replica groups instead, "
                    "and shard over a mesh of one dimension in each"
                )


def _sharding(parameter: DTensor) -> str:
    """The layout in words that are the same on all ranks."""
    mesh: Any = parameter.device_mesh
    names = ", ".join(mesh.mesh_dim_names or ())
    group = sorted(_root(mesh).mesh.flatten().tolist())  # ranks of one process group in several groups' meshes differ
    places = [group.index(rank) for rank in mesh.mesh.flatten().tolist()]
    return f"on mesh {tuple(mesh.mesh.shape)} ({names}) of {places} as {parameter.placements}"


def _spec(name: str, tensor: torch.Tensor, devices: list[torch.device]) -> TensorSpec:
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(local.shape),
        itemsize_bytes=tensor.element_size(),
        device=devices.index(local.device) if tensor.requires_grad else 0,
        trained=tensor.requires_grad,
    )
