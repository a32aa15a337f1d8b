"""Which GPUs each local replica group sees: the value of CUDA_VISIBLE_DEVICES for its workers.

`--gpus` has four modes:

    auto     each group gets a share of its own, next to each other, all of the same size; left-over GPUs stay unused
    share    each group gets as many as it has workers, taken in turn, so several groups may use the same GPU
    all      nothing is set: every group sees what ftrun sees
    none     every group sees no GPU

A value is `None` (leave the variable alone) or the text for the variable; "" hides every GPU. What is visible is passed
in as texts and only ever copied, so that indices, UUIDs and MIG names work alike. Pure: nobody asks a driver here.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

MODES = ("auto", "share", "all", "none")
"""What `--gpus` may be."""


def divide(visible: Sequence[str], groups: int, nproc: int, mode: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of every group, in their order.

    Args:
        visible: the GPUs that ftrun sees, as CUDA_VISIBLE_DEVICES would name them.
        groups: replica groups on this host.
        nproc: workers per group; each has a GPU of its own within its group (modes auto and share).
        mode: one of MODES.

    Raises:
        ConfigError: too few GPUs for the mode, a GPU named twice, or an unknown mode.
    """
    if mode not in MODES:
        near = difflib.get_close_matches(mode, MODES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--gpus {mode!r}: unknown; {hint}(known: {', '.join(MODES)})")
    if groups < 1 or nproc < 1:
        raise ConfigError(f"{groups} replicas of {nproc} workers each: there must be at least 1 of both")
    if mode == "all":
        return [None] * groups
    if mode == "none":
        return [""] * groups
    for gpu in visible:
        if visible.count(gpu) > 1:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={','.join(visible)}: {gpu} is named twice; name each GPU once")
    return _own(visible, groups, nproc) if mode == "auto" else _shared(visible, groups, nproc)


def _own(visible: Sequence[str], groups: int, nproc: int) -> list[str | None]:
    if not visible:
        return [None] * groups
    share = len(visible) // groups
    if share < nproc:
        fewer = len(visible) // nproc
        instead = f"--replicas {fewer}" if fewer else f"--nproc-per-replica {len(visible)} or fewer"
        raise ConfigError(
            f"{groups} replicas of {nproc} {_workers(nproc)} need {groups * nproc} GPUs, {len(visible)} are visible; "
            f"use {instead}, --gpus share to let them share GPUs, or --gpus none to train without"
        )
    return [",".join(visible[group * share : (group + 1) * share]) for group in range(groups)]


def _shared(visible: Sequence[str], groups: int, nproc: int) -> list[str | None]:
    if nproc > len(visible):
        raise ConfigError(
            f"--gpus share: each replica has {nproc} {_workers(nproc)} and needs as many different GPUs, "
            f"{len(visible)} are visible; lower --nproc-per-replica, or use --gpus none to train without"
        )
    in_turn = [visible[index % len(visible)] for index in range(groups * nproc)]
    return [",".join(in_turn[group * nproc : (group + 1) * nproc]) for group in range(groups)]


def _workers(nproc: int) -> str:
    return "worker" if nproc == 1 else "workers"
