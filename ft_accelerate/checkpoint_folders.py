"""Folders that `save_state` writes: complete or not there, and with the Manager's place in the run.

How it works. A folder is written beside its place under a hidden name (`write`); its files are moved there (`place`)
when all replicas are known to hold the step (`Leadership`). So who dies while saving leaves no half of a checkpoint
where `load_state` looks, nor one of a step that the others never made. `ft_manager.json` holds the Manager's step and
lineage: replicas that load the same folder agree at once; plain Accelerate ignores it.

A script that counts its steps by itself counts from 0 again when its group was started again, and its names are those
of old checkpoints then. `Names` keeps these: what would replace the state of another step is written beside it.

Threads: the training thread.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections import deque
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from ft_core.loop.publishing import PlacedFolder

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("ft_accelerate")
MANAGER = "ft_manager.json"
MAX_NAMES = 1024
"""Remembered; one that is asked for again later than that counts as new."""


def automatic_folder(project_dir: str, iteration: int) -> str:
    """Where Accelerate's automatic naming puts the next one."""
    return os.path.join(project_dir, "checkpoints", f"checkpoint_{iteration}")


class Names:
    """The folders that this process was asked to save to."""

    def __init__(self) -> None:
        self._asked: deque[str] = deque(maxlen=MAX_NAMES)
        self.joined_at = 0
        """Committed steps of the others when their state was taken over, which a script's own counter does not know."""

    def asked(self, target: str) -> bool:
        """Whether this name may be an old one: it is asked for the first time, by who has taken over others' state."""
        fresh = target not in self._asked
        self._asked.append(target)
        return fresh and self.joined_at > 0

    def place_of(self, target: str, committed: int) -> str:
        """Where to write instead of `target`: beside it, if that is numbered and has the state of another step.

        Args:
            target: as the script said.
            committed: steps of the state that is written.
        """
        there = _step_of(target)
        if there in (None, committed) or not re.search(r"\d", os.path.basename(os.path.abspath(target))):
            return target
        beside = f"{os.path.abspath(target)}.committed_{committed}"
        log.warning(
            "save_state(%r): that folder has the state of committed step %d, and would get that of step %d: written to "
            "%s instead. This replica took over the run at step %d, and a counter of the script's own does not: name "
            "checkpoints by accelerator.committed_steps or accelerator.epoch, or keep the counter in an object that "
            "is given to register_for_checkpointing()",
            target, there, committed, beside, self.joined_at,
        )  # fmt: skip
        return beside


def _step_of(folder: str) -> int | None:
    """Committed steps of a checkpoint; None: it has no such note, or none that can be read, and nothing is known."""
    try:
        return (manager_state(folder) or {}).get("step")
    except ValueError:
        return None


def placed(target: str, step: int) -> PlacedFolder:
    """The folder for `target` before it is in its place.

    Args:
        target: its place.
        step: of the state that is written.
    """
    parent, name = os.path.split(os.path.abspath(target))
    if os.path.basename(parent) == "checkpoints":
        parent = os.path.dirname(parent)
    return PlacedFolder(parent, name, step)


def from_first(path: str) -> str:
    """What the first rank of this group calls it with; all ranks call it."""
    shared = [path]
    broadcast_object_list(shared)
    return shared[0]


def write(
    folder: PlacedFolder, save: Callable[[str], Any], manager_state: dict[str, int], first: bool, wait: Any
) -> None:
    """Write a folder, beside its place.

    Args:
        folder: which.
        save: writes Accelerate's part into a folder.
        manager_state: of the Manager.
        first: this is the group's first rank.
        wait: a barrier of the group.
    """
    stage = folder.begin(from_first, first=first)
    save(stage)
    wait()
    if first:
        with open(os.path.join(stage, MANAGER), "w", encoding="utf-8") as file:
            json.dump(manager_state, file)
        folder.complete(stage)


def place(folder: PlacedFolder, target: str) -> None:
    """Put what `write` wrote in its place, where files that are there are replaced one by one. On the first rank.

    Nothing, if that was done.
    """
    partial = folder.beside
    if not os.path.isdir(partial):
        return
    if not os.path.exists(target):
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        os.rename(partial, target)  # at once: nobody sees a part of it
        return
    for name in sorted(os.listdir(partial)):
        path = os.path.join(target, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        os.replace(os.path.join(partial, name), path)
    os.rmdir(partial)


def take_over(old: str, new: str) -> None:
    """Move what a folder has, and the one that will replace it has not, into that one; none that is not there."""
    for name in sorted(os.listdir(old)) if os.path.isdir(old) else ():
        before, after = os.path.join(old, name), os.path.join(new, name)
        if not os.path.lexists(after):
            os.rename(before, after)
        elif os.path.isdir(before) and os.path.isdir(after):
            take_over(before, after)


def manager_state(folder: str) -> dict[str, int] | None:
    """The Manager's state that `write` noted; None for a checkpoint of plain Accelerate."""
    try:
        with open(os.path.join(folder, MANAGER), encoding="utf-8") as file:
            return {str(key): int(value) for key, value in json.load(file).items()}
    except FileNotFoundError:
        return None


def prune(parent: str, limit: int | None) -> None:
    """Delete the oldest folders over the limit, as Accelerate's automatic naming does."""
    folders = sorted((int(m[1]), name) for name in os.listdir(parent) if (m := re.fullmatch(r"checkpoint_(\d+)", name)))
    for _, name in folders[: -limit if limit else 0]:
        log.info("deleting %s to make room for newer checkpoints", os.path.join(parent, name))
        shutil.rmtree(os.path.join(parent, name))


def newest(project_dir: str) -> str:
    """The newest automatically named folder.

    Raises:
        FileNotFoundError: there is none.
    """
    parent = os.path.join(project_dir, "checkpoints")
    folders = [(int(m[1]), name) for name in os.listdir(parent) if (m := re.fullmatch(r"checkpoint_(\d+)", name))]
    if not folders:
        raise FileNotFoundError(f"no checkpoint_N in {parent}")
    return os.path.join(parent, max(folders)[1])
