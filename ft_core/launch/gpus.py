"""Which GPUs each local replica group sees: the value of CUDA_VISIBLE_DEVICES for its workers.

`--gpus` has four modes:

    auto     each group gets a share of its own, next to each other, all of the same size; left-over GPUs stay unused
    share    each group gets as many as it has workers, taken in turn, so several groups may use the same GPU
    all      nothing is set: every group sees what ftrun sees
    none     every group sees no GPU

A value is `None` (leave the variable alone) or the text for the variable; "" hides every GPU. `visible_gpus` reads what
ftrun itself sees, as CUDA does: an index, a GPU's UUID or its beginning (GPU-8a3f...), a MIG slice by its UUID
(MIG-...) or by GPU and instances (MIG-GPU-.../1/0). CUDA stops at the first entry that it does not understand, and
trains on fewer GPUs without a word; here that is an error. Entries are copied as they are. Pure: nobody asks a driver.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

MODES = ("auto", "share", "all", "none")
"""What `--gpus` may be."""
HIDDEN = ("-1", "NoDevFiles")
"""Entries from which on CUDA hides everything."""
INDEX = re.compile(r"[0-9]{1,6}", re.ASCII)
_HEX = "[0-9a-fA-F]"
GPU = re.compile(rf"GPU-{_HEX}[0-9a-fA-F-]{{0,35}}")
"""A UUID, whole or its beginning."""
MIG = re.compile(rf"MIG-(GPU-)?{_HEX}[0-9a-fA-F-]{{0,35}}(/[0-9]{{1,3}}/[0-9]{{1,3}})?")
FORMS = "an index (0), a GPU's UUID or its beginning (GPU-8a3f...), or a MIG slice's name (MIG-..., MIG-GPU-.../1/0)"


def visible_gpus(text: str) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES, up to one that hides the rest; spaces and empty entries at its ends are no
    matter.

    Raises:
        ConfigError: an entry that CUDA does not understand, a GPU named twice, or entries of several kinds.
    """
    entries: list[str] = []
    given = [entry.strip() for entry in text.split(",")]
    while given and not given[-1]:
        given.pop()
    for number, entry in enumerate(given, 1):
        if entry in HIDDEN:
            break
        where = f"CUDA_VISIBLE_DEVICES={text}: entry {number}"
        if not entry:
            raise ConfigError(f"{where} is empty: take the comma out")
        if not (INDEX.fullmatch(entry) or GPU.fullmatch(entry) or MIG.fullmatch(entry)):
            raise ConfigError(f"{where}, {entry!r}, names no GPU: it must be {FORMS}")
        if entries and _kind(entry) != _kind(entries[0]):
            raise ConfigError(f"{where}, {entry!r}, is of another kind than {entries[0]!r}: name all GPUs alike")
        twin = next((known for known in entries if _same(known, entry)), None)
        if twin is not None:
            again = "is named twice" if twin == entry else f"may be the same GPU as {twin!r}"
            raise ConfigError(f"{where}: {entry} {again}; name each GPU once")
        entries.append(entry)
    return entries


def _kind(entry: str) -> str:
    return "index" if INDEX.fullmatch(entry) else entry[:3]


def _same(first: str, second: str) -> bool:
    """Whether two entries can be one GPU. Of MIG names none is abbreviated."""
    if INDEX.fullmatch(first):
        return int(first) == int(second)
    if first.startswith("MIG"):
        return first.lower() == second.lower()
    return first.lower().startswith(second.lower()) or second.lower().startswith(first.lower())


def divide(visible: Sequence[str], groups: int, nproc: int, mode: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of every group, in their order.

    Args:
        visible: the GPUs that ftrun sees, as CUDA_VISIBLE_DEVICES would name them.
        groups: replica groups on this host.
        nproc: workers per group; each has a GPU of its own within its group (modes auto and share).
        mode: one of MODES.

    Raises:
        ConfigError: too few GPUs for the mode, or an unknown mode.
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
