"""`choose`: which process group carries the gradients between the replica groups. Pure.

How it works. The rule knows three things: what the user wants (an argument, or FT_BACKEND), on which devices the
model's trained parameters are, and what this build of torch and this machine have. It returns the name of a backend, or
raises an error that says what to do. `auto` takes the device's own collectives where there are any: NCCL for CUDA, XCCL
for Intel's GPUs, Gloo for CPU memory. A process group has one device, so a model on several is refused, except by
Gloo, which copies what is on a GPU through host memory.

What this torch lacks for a backend is worded here only, in `lacks`: for the rule, and for who makes a group himself.

`process_group/default.py` asks torch and makes the group; ft-doctor asks the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_core.errors import ConfigError
from ft_core.settings import AUTO

DEVICE_OF = {"nccl": "cuda", "xccl": "xpu", "baby-nccl": "cuda"}
"""The kind of device whose memory a backend carries; the others carry CPU memory, and CUDA's through it."""
THROUGH_HOST = ("cpu", "cuda")
"""Kinds of device that Gloo takes tensors of."""
OWN = {"cuda": "nccl", "xpu": "xccl"}
"""What `auto` takes for a kind of device."""
MOVE = "move it with model.to('{device}') before it is wrapped"
"""How a script that makes its own Manager gets a model onto another device."""
MIN_NCCL = (2, 25)
"""Before 2.19 two threads that abort two communicators may wait for each other; the reference implementation aborts
communicators that do not block from 2.25 on, which came with torch 2.7."""


@dataclass(frozen=True)
class TorchBuild:
    """What a build of torch can do here; no accelerator by default."""

    version: str = ""
    cuda: str = ""
    """The CUDA (or ROCm) version it is built for; '': none."""
    nccl: bool = False
    """NCCL (or RCCL) is in it."""
    cuda_devices: int = 0
    """As many as this process can use."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, if it is set."""
    xccl: bool = False
    xpu_devices: int = 0
    nccl_version: tuple[int, ...] = ()
    """(): not known."""


@dataclass(frozen=True)
class Wish:
    """What the user asks for, and where."""

    backend: str = AUTO
    said: str = "backend='auto'"
    """As the user wrote it, for errors."""
    move: str = MOVE
    """How the interface that the user typed in puts the model elsewhere; {device} stands for the kind of device."""

    def to(self, device: str) -> str:
        """What to do to have the model there."""
        return self.move.replace("{device}", device)


def kind_of(device: str) -> str:
    """Of a device's name: 'cuda' of 'cuda:1'."""
    return device.partition(":")[0]


def choose(wish: Wish, devices: Sequence[str], build: TorchBuild) -> str:
    """The backend of the group that carries the gradients; never `auto`.

    Args:
        wish: what the user asks for.
        devices: those of the trained parameters, each once, like 'cpu' or 'cuda:0'; a kind alone is any of it.
        build: of torch, on this machine.

    Raises:
        ConfigError: the model's devices and the wish, or this torch, cannot work together.
    """
    if wish.backend == AUTO:
        return _own(wish, devices, build)
    check_build(wish.backend, wish, build)
    check_devices(wish.backend, wish, devices)
    return wish.backend


def check_devices(backend: str, wish: Wish, devices: Sequence[str]) -> None:
    """See that a group of this backend carries gradients on all of these devices. Raises ConfigError."""
    device = DEVICE_OF.get(backend)
    odd = [name for name in devices if kind_of(name) not in ((device,) if device else THROUGH_HOST)]
    if odd:
        works = (
            f"on {device} devices only" if device else "for models on the CPU, or on CUDA devices through host memory"
        )
        instead = wish.to(device or "cpu")
        raise ConfigError(
            f"{wish.said}: the model is on {_and(devices)}, and {backend} works {works}: {instead}, or "
            f"{_leave_out(wish)}"
        )
    if device and len(devices) > 1:
        raise ConfigError(
            f"{wish.said}: the model is on {_and(devices)}, and a {backend} group has one device: put the whole model "
            "on one, or set FT_BACKEND=gloo, which copies the gradients through host memory"
        )


def check_tensor(device: str, *, backend: str, own: str | None, said: str) -> None:
    """See that a tensor on `device` can travel over the group of the gradients. Raises ConfigError.

    Args:
        device: of the tensor, like 'cuda:0'.
        backend: of the group.
        own: the device that the group is bound to; None: to none.
        said: the collective and the group, for errors.
    """
    kinds = (DEVICE_OF[backend],) if backend in DEVICE_OF else THROUGH_HOST
    if device == own or (own is None and kind_of(device) in kinds):
        return
    place = own if own is not None else kinds[0]
    beside = f", or to the CPU: what is there travels over Gloo beside {backend}" if backend in DEVICE_OF else ""
    raise ConfigError(
        f"{said} takes tensors on {own or ' and '.join(kinds)}, and this one is on {device}: move it with "
        f"tensor.to({place!r}){beside}"
    )


def _leave_out(wish: Wish) -> str:
    if wish.backend == AUTO:
        return "set FT_BACKEND=gloo"
    return f"leave out {wish.said}: then the device decides"


def _own(wish: Wish, devices: Sequence[str], build: TorchBuild) -> str:
    kinds = sorted({kind_of(name) for name in devices})
    if len(devices) > 1:
        raise ConfigError(
            f"the trained parameters of the model are on {_and(devices)}, and a process group has one device: put the "
            "whole model on one, or set FT_BACKEND=gloo, which copies the gradients through host memory"
        )
    kind = kinds[0] if kinds else "cpu"
    if kind in OWN and not (build.cuda_devices if kind == "cuda" else build.xpu_devices):
        raise ConfigError(f"device={devices[0]}: {_no_device(kind, build)}; or {wish.to('cpu')}")
    if kind == "cuda" and build.nccl:
        return "nccl"
    if kind == "xpu" and build.xccl:
        return "xccl"
    if kind in THROUGH_HOST:
        return "gloo"
    lacks = f": torch {build.version} is built without {OWN[kind].upper()}" if kind in OWN else ""
    raise ConfigError(
        f"the model is on {devices[0]}, for which there is no process group between replicas{lacks}: {wish.to('cpu')}"
    )


def check_build(backend: str, wish: Wish, build: TorchBuild) -> None:
    """See that this torch, on this machine, has the backend. Raises ConfigError."""
    found = lacks(backend, build)
    if found:
        raise ConfigError(f"{wish.said}: {found}; or {_leave_out(wish)}")


def lacks(backend: str, build: TorchBuild) -> str:
    """What this torch, on this machine, lacks for the backend, and what to do about it; "": nothing."""
    device = DEVICE_OF.get(backend)
    if device and not (build.cuda and build.cuda_devices if device == "cuda" else build.xpu_devices):
        return _no_device(device, build)
    if device == "xpu" and not build.xccl:
        return f"torch {build.version} is built without XCCL: install its XPU build (2.8 or newer)"
    if device != "cuda":
        return ""
    if not build.nccl:
        return f"torch {build.version} is built without NCCL: install a build with it"
    if build.nccl_version and build.nccl_version < MIN_NCCL:
        have, need = (".".join(map(str, version)) for version in (build.nccl_version, MIN_NCCL))
        return f"NCCL {have} is too old, its abort cannot be relied on: install {need} or newer (torch 2.7 has it)"
    return ""


def _no_device(kind: str, build: TorchBuild) -> str:
    """Why there is no device of this kind, and what to do."""
    if kind == "cuda" and not build.cuda:
        return f"torch {build.version} is built without CUDA: install a CUDA build of it"
    if kind == "cuda" and build.visible is not None:
        return f"no GPU is visible here (CUDA_VISIBLE_DEVICES={build.visible!r}): correct that, or see nvidia-smi"
    see = "nvidia-smi shows" if kind == "cuda" else "xpu-smi shows, and install torch's XPU build"
    return f"torch finds no {kind} device on this machine: see what {see}"


def _and(devices: Sequence[str]) -> str:
    return " and ".join((", ".join(devices[:-1]), devices[-1])) if len(devices) > 1 else "".join(devices)
