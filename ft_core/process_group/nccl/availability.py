"""Whether NCCL can be used here, and what to do if not. Pure: `complaint` is given the facts, `facts` collects them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

MIN_NCCL = (2, 25)
"""Before 2.19 two threads that abort two communicators may wait for each other; the reference implementation aborts
communicators that do not block from 2.25 on, which came with torch 2.7."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found."""

    torch_version: str
    has_gpu: bool
    built_with_cuda: bool
    has_nccl: bool
    nccl: tuple[int, ...]
    visible: str | None
    """CUDA_VISIBLE_DEVICES, if it is set."""


def facts() -> Facts:
    """Look at this torch and this machine."""
    has_gpu = torch.cuda.is_available()
    has_nccl = dist.is_nccl_available()
    return Facts(
        torch_version=torch.__version__,
        has_gpu=has_gpu,
        built_with_cuda=torch.version.cuda is not None or torch.version.hip is not None,
        has_nccl=has_nccl,
        nccl=tuple(torch.cuda.nccl.version()[:3]) if has_gpu and has_nccl else (),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def complaint(found: Facts) -> str | None:
    """Why NCCL cannot be used, with what to do; None if it can."""
    instead = "or use ProcessGroupGloo, which carries tensors of any device through host memory"
    if not found.built_with_cuda:
        return f"torch {found.torch_version} was built without CUDA: install its CUDA build, {instead}"
    if not found.has_gpu:
        hidden = "" if found.visible is None else f" (CUDA_VISIBLE_DEVICES={found.visible!r})"
        return f"torch sees no GPU here{hidden}: see nvidia-smi and the driver's version, {instead}"
    if not found.has_nccl:
        return f"torch {found.torch_version} was built without NCCL: install one with it, {instead}"
    if found.nccl < MIN_NCCL:
        have, need = (".".join(map(str, version)) for version in (found.nccl, MIN_NCCL))
        return (
            f"NCCL {have} is too old, its abort cannot be relied on: {need} or newer is needed, which comes with "
            f"torch 2.7, {instead}"
        )
    return None
