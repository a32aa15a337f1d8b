"""Which device the tensors of a collective are on, checked before anything is launched. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_DEPTH = 3
"""Collectives take tensors, lists of them, and lists of lists."""


def tensors_of(arguments: Iterable[Any], depth: int = MAX_DEPTH) -> Iterator[torch.Tensor]:
    """All tensors in a collective's arguments."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif depth and isinstance(argument, (list, tuple)):
            yield from tensors_of(argument, depth - 1)


def check_devices(name: str, arguments: Iterable[Any], device: torch.device) -> None:
    """Raise ConfigError unless all tensors of the collective `name` are on `device`."""
    others = {tensor.device for tensor in tensors_of(arguments) if tensor.device != device}
    if not others:
        return
    found = sorted({str(tensor.device) for tensor in tensors_of(arguments)})
    if len(found) > 1:
        raise ConfigError(
            f"{name}: its tensors are on {' and '.join(found)}; a collective takes tensors of one device, and this "
            f"group those on {device}"
        )
    advice = (
        "tensors in CPU memory need ProcessGroupGloo"
        if found == ["cpu"]
        else f"move it there, or give the group device={found[0]!r}, or make that the current device first"
    )
    raise ConfigError(f"{name}: its tensor is on {found[0]}, this group carries tensors on {device} only; {advice}")
