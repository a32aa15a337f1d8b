"""`torch_build`: what this build of torch, and this machine, have for the backends. Judged by `backends.lacks`.

Threads: any.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch

from ft_core.backends import TorchBuild, lacks
from ft_core.errors import ConfigError


@functools.cache
def _built() -> TorchBuild:
    distributed = torch.distributed
    return TorchBuild(
        version=str(torch.__version__), cuda=torch.version.cuda or torch.version.hip or "",
        nccl=distributed.is_available() and distributed.is_nccl_available(),
        xccl=distributed.is_available() and bool(getattr(distributed, "is_xccl_available", bool)()),
    )  # fmt: skip


def torch_build() -> TorchBuild:
    """What this build of torch can do here. Initialises no device."""
    built = _built()
    return TorchBuild(
        built.version, built.cuda, built.nccl, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"),
        built.xccl, torch.xpu.device_count() if built.xccl else 0,
    )  # fmt: skip


def lacks_here(backend: str) -> str:
    """What is lacking for a group of this backend, and what to do about it; "": nothing.

    Stricter than `torch_build`: the driver has to answer, and NCCL's version counts.
    """
    build = torch_build()
    if build.cuda_devices and not torch.cuda.is_available():
        build = replace(build, cuda_devices=0)
    if build.cuda_devices and build.nccl:
        build = replace(build, nccl_version=tuple(torch.cuda.nccl.version()[:3]))
    return lacks(backend, build)


def check_here(group: str, backend: str) -> None:
    """See that a `group`, as its class is called, can be made here. Raises ConfigError."""
    found = lacks_here(backend)
    if found:
        raise ConfigError(
            f"{group}: {found}; or use ProcessGroupGloo, which carries tensors of any device through host memory"
        )
