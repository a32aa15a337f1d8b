"""The process groups that are taken where the user names none: for gradients by their device, and for CPU memory.

How it works. `backends.choose` decides, on what `torch_build` finds here; the class is looked up by its name when it is
made. A group is made while the model's device is the current one, so one that belongs to a device takes that.

Threads: the caller's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ft_core.backends import DEVICE_OF, MOVE, Wish, check_build, check_devices, check_tensor, choose
from ft_core.errors import ConfigError
from ft_core.process_group.availability import torch_build
from ft_core.process_group.gloo.group import ProcessGroupGloo
from ft_core.process_group.gloo.tensors import check_dtype, check_memory
from ft_core.settings import check_backend

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ft_core.process_group.base import ProcessGroup

Devices = torch.device | str | Iterable[torch.device | str] | None
"""Of the model: one, several, or not known."""
CLASSES = {
    "gloo": "ProcessGroupGloo",
    "nccl": "ProcessGroupNCCL",
    "xccl": "ProcessGroupXCCL",
    "baby-gloo": "ProcessGroupBabyGloo",
    "baby-nccl": "ProcessGroupBabyNCCL",
}
"""By the names that FT_BACKEND takes, those of the classes."""


def default_process_group(device: Devices = None, backend: str | None = None, *, move: str = MOVE) -> ProcessGroup:
    """Make the process group for gradients on `device`, unconfigured: NCCL for CUDA, XCCL for Intel's GPUs, else Gloo.

    Args:
        device: of the trained parameters, one or several; None: the accelerator that this process can use, else the
            CPU.
        backend: "gloo", "nccl", "xccl", "baby-gloo", "baby-nccl", or "auto", which decides by the device; None:
            FT_BACKEND, else "auto".
        move: how the user puts the model on another device, for errors; "{device}" stands for the kind of device.

    Raises:
        ConfigError: an unknown name; the backend, the devices of the model and this torch cannot work together.
    """
    devices = names_of(_each(device))
    name = choose(wish(backend, move), devices, torch_build())
    try:
        with current_device(devices if name in DEVICE_OF else ()):
            return _new(name)
    except ConfigError as error:  # as of a library that is too old: in the words of whoever constructs groups himself
        if name not in DEVICE_OF:
            raise
        raise ConfigError(f"{error}; without a script of your own: set FT_BACKEND=gloo") from error


@dataclass(frozen=True)
class ByDevice:
    """Stands for the group for gradients, until it is known on which device the models are.

    Args:
        move: as of `default_process_group`.
    """

    move: str = MOVE

    def check_build(self) -> None:
        """See that this torch has the backend that the user asks for, whatever the device. Raises ConfigError."""
        asked = wish(move=self.move)
        check_build(asked.backend, asked, torch_build())

    def check(self, device: Devices) -> None:
        """See that there is a group for models on `device`. Raises ConfigError, as `make`."""
        choose(wish(move=self.move), names_of(_each(device)), torch_build())

    def make(self, device: Devices) -> ProcessGroup:
        """Make it. Raises as `default_process_group`."""
        return default_process_group(device, move=self.move)


def check_group(group: ProcessGroup, devices: Iterable[torch.device | str]) -> None:
    """See that gradients on these devices can travel over a group that the user gave. Raises ConfigError."""
    backend = group.torch_backend
    if backend in DEVICE_OF or group.carries_cpu_memory:
        said = f"pg={type(group).__name__}()"
        names = names_of(devices)
        check_devices(backend, Wish(backend, said), names)
        own = _device_of(group)
        if own is not None and names not in ([], [str(own)], [own.type]):
            raise ConfigError(
                f"{said}: the model is on {names[0]}, and this group carries tensors on {own}: make the group while "
                f"{names[0]} is the current device, or leave out {said}: then the device of the model decides"
            )


def check_tensors(name: str, group: ProcessGroup, tensors: Iterable[torch.Tensor]) -> None:
    """See that the collective `name` of these tensors can travel over a group, or beside it. Raises ConfigError.

    What is in CPU memory can: where the group does not carry it, one of CPU memory stands beside it. Whatever carries
    it, its elements have to be what lies in its memory, so that a script runs alike over all groups.
    """
    own = _device_of(group)
    if own is None and group.torch_backend not in DEVICE_OF and not group.carries_cpu_memory:
        return  # of a kind that is not known here
    for tensor in tensors:
        if tensor.device.type != "cpu":
            check_tensor(
                str(tensor.device),
                backend=group.torch_backend,
                own=None if own is None else str(own),
                said=f"{name} over {type(group).__name__}",
            )
        if tensor.device.type == "cpu" or group.torch_backend == "gloo":
            check_dtype(name, tensor.dtype.to_real())  # a complex number travels as two
        check_memory(name, tensor)


def _device_of(group: ProcessGroup) -> torch.device | None:
    """The one whose tensors it carries; None: not bound to one."""
    while (inner := getattr(group, "parent", None)) is not None:
        group = inner
    found = getattr(group, "device", None)
    return found if isinstance(found, torch.device) else None


def names_of(devices: Iterable[torch.device | str]) -> list[str]:
    """The names of the devices, each once, in order."""
    return sorted({str(torch.device(device)) for device in devices})


def host_process_group() -> ProcessGroup:
    """Make an unconfigured group for tensors in CPU memory, whatever carries the gradients."""
    return ProcessGroupGloo()


def wish(backend: str | None = None, move: str = MOVE) -> Wish:
    """What the user asks for: by the argument, else by FT_BACKEND. Raises ConfigError for an unknown name."""
    if backend is not None:
        return Wish(check_backend(backend, "backend"), f"backend={backend!r}", move)
    said = os.environ.get("FT_BACKEND", "")
    return Wish(check_backend(said, "FT_BACKEND"), f"FT_BACKEND={said}", move) if said else Wish(move=move)


def current_device(devices: Iterable[str]) -> AbstractContextManager[Any]:
    """Inside, the accelerator among `devices` is the current one of this thread; a kind alone leaves it as it is."""
    for device in map(torch.device, devices):
        if device.type == "cuda" and device.index is not None:
            return torch.cuda.device(device)
        if device.type == "xpu" and device.index is not None:
            return cast("AbstractContextManager[Any]", torch.xpu.device(device))
    return contextlib.nullcontext()


def _each(device: Devices) -> list[torch.device | str]:
    if isinstance(device, torch.device | str):
        return [device]
    if device is not None:
        return list(device)
    return ["cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"]


def _new(name: str) -> ProcessGroup:
    # By name, where users find it: the package imports this module.
    made: Callable[[], ProcessGroup] = getattr(importlib.import_module(__package__ or ""), CLASSES[name])
    return made()
