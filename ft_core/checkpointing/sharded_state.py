"""`LocalShard`: one rank's part of a sharded tensor (DTensor), as it is served to and received from other replicas.

How it works. In a state that is served each DTensor stands as its local tensor and a description of the whole. The
receiver is the rank of the same number in another group, so the part is the same part, if the descriptions are equal.
`sharded` makes DTensors again, on the meshes of the receiver's own state: a received state cannot create a mesh, which
would be a collective of the group. Nothing is communicated inside the group in either direction.

Threads: pure.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ft_core.errors import HealError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is cut, and which part this is."""

    shape: tuple[int, ...]
    """Of the whole."""
    stride: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Of the mesh, in the order of its dimensions."""
    coordinate: tuple[int, ...]
    """Of the rank that holds the part."""
    placements: tuple[str, ...]

    @property
    def mesh(self) -> tuple[Any, ...]:
        """What identifies the mesh, and the place in it."""
        return self.mesh_shape, self.mesh_names, self.ranks, self.coordinate

    def encoded(self) -> list[list[Any]]:
        """What travels in a skeleton."""
        parts = self.shape, self.stride, self.mesh_shape, self.mesh_names, self.ranks, self.coordinate, self.placements
        return [list(part) for part in parts]

    @staticmethod
    def decoded(*parts: list[Any]) -> Sharding:
        """What a skeleton says. Raises ValueError."""
        kinds = (int, int, int, str, int, int, str)
        if len(parts) != len(kinds) or any(
            type(x) is not k for part, k in zip(parts, kinds, strict=True) for x in part
        ):
            raise ValueError("not the description of a sharded tensor")
        return Sharding(*map(tuple, parts))

    def __str__(self) -> str:
        names = f" ({', '.join(self.mesh_names)})" if self.mesh_names else ""
        return (
            f"{list(self.shape)} as {', '.join(self.placements)}, part {list(self.coordinate)} of mesh "
            f"{list(self.mesh_shape)}{names} of ranks {list(self.ranks)}"
        )


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A part of a sharded tensor."""

    tensor: torch.Tensor
    """A plain tensor."""
    sharding: Sharding


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor. Asks for the class only where somebody has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_shard(value: Any) -> LocalShard:
    """The part of a DTensor that this rank holds; shares its memory."""
    mesh: DeviceMesh = value.device_mesh
    sharding = Sharding(
        tuple(value.shape), tuple(value.stride()), tuple(mesh.mesh.shape), tuple(mesh.mesh_dim_names or ()),
        tuple(mesh.mesh.flatten().tolist()), tuple(mesh.get_coordinate() or ()), tuple(map(str, value.placements)),
    )  # fmt: skip
    return LocalShard(value._local_tensor.detach(), sharding)


class Meshes:
    """Where a receiver's sharded tensors lie, from its own state; what it is told is compared with that.

    Args:
        own: key path -> DTensor, of all in the own state.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = {path: local_shard(value).sharding for path, value in own.items()}
        self._places: dict[tuple[Any, ...], Any] = {}
        """For (mesh, placements in words): a DTensor that lies so."""
        for path, value in own.items():
            sharding = self._own[path]
            self._places.setdefault((sharding.mesh, sharding.placements), value)

    def sharded(self, part: LocalShard, path: str) -> Any:
        """The DTensor that `part` is of.

        Raises:
            HealError: here the tensor is cut otherwise, or nothing lies on such a mesh.
        """
        from torch.distributed.tensor import DTensor

        told, own = part.sharding, self._own.get(path)
        if own is not None and own != told:
            raise HealError(f"{path}: the donor's is {told}, and here it is {own}: shard alike in all replica groups")
        like = self._places.get((told.mesh, told.placements))
        if like is None:
            raise HealError(f"{path}: the donor's is {told}, and nothing here is sharded so")
        return DTensor.from_local(
            part.tensor,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=torch.Size(told.shape),
            stride=told.stride,
        )
