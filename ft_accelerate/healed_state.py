"""State that all replicas must have alike besides the Manager's version: that of the prepared objects, as plain data.

How it works. `save` is called on a donor when a window opens; its tensors are live ones, which do not change before the
next optimizer step. `load` puts it into a newcomer's objects, in the order in which they were prepared, and moves its
loaders (matched in order; those for evaluation may be missing). Both see the accelerator as it is at that moment, so
objects may be prepared in several calls.

Invariant: called between two windows only, never between forward and backward. Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_accelerate.loader import GroupDataLoader
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KINDS = ("_models", "_optimizers", "_schedulers", "_custom_objects")
"""The Accelerator's lists of what has `state_dict` and `load_state_dict`."""


def loaders(accelerator: Any) -> list[GroupDataLoader]:
    """The prepared loaders, in order."""
    return [loader for loader in accelerator._dataloaders if isinstance(loader, GroupDataLoader)]


def save(accelerator: Any) -> dict[str, Any]:
    """Everything, as dicts, lists, numbers, texts and tensors."""
    scaler = accelerator.scaler
    return {
        **{kind.strip("_"): [obj.state_dict() for obj in getattr(accelerator, kind)] for kind in KINDS},
        "scaler": None if scaler is None else scaler.state_dict(),
        "groups": accelerator.num_replica_groups,
        "step": accelerator.step,
        "first_step": accelerator._run.first_step,
        "committed": accelerator.committed_steps,
        "epoch": accelerator.epoch,
        "save_iteration": accelerator.save_iteration,
        "loaders": [loader.progress() for loader in loaders(accelerator)],
    }


def load(accelerator: Any, state: Mapping[str, Any]) -> None:
    """Take over what `save` returned on a donor.

    Raises:
        ConfigError: it has other objects than this replica.
    """
    accelerator._leadership.forget()
    for kind in KINDS:
        mine, theirs = getattr(accelerator, kind), state[kind.strip("_")]
        _check(kind.strip("_"), mine, theirs)
        for obj, saved in zip(mine, theirs, strict=True):
            obj.load_state_dict(saved)
    if accelerator.scaler is not None and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.step = state["step"]
    accelerator._run.first_step = state["first_step"]
    accelerator._names.joined_at = state["committed"]
    accelerator.epoch = state["epoch"]
    accelerator.project_configuration.iteration = state["save_iteration"]
    accelerator._run.window.division.divide(state["groups"])
    mine, theirs = loaders(accelerator), state["loaders"]
    if len(mine) < needed(len(mine), theirs):
        raise ConfigError(
            f"the others train on data loader {needed(len(mine), theirs)} that they prepared, and this replica, which "
            f"comes back or joins, has prepared {len(mine)} so far: prepare all loaders for training before the first "
            "step, in the same order everywhere; those for evaluation may be prepared at any time"
        )
    for loader, progress in zip(mine, theirs, strict=False):
        loader.go_on(progress)


def needed(mine: int, theirs: Sequence[Mapping[str, int | None]]) -> int:
    """How many of the others' loaders this replica must have: all that it has, and up to the last that they trained on.

    Loaders that they have prepared meanwhile for evaluation are their own affair, and so are those of this replica that
    they have not prepared yet.
    """
    trained = [index + 1 for index, progress in enumerate(theirs) if progress["trained"]]
    return max([min(mine, len(theirs)), *trained])


def _check(what: str, mine: Sequence[object], theirs: Sequence[object]) -> None:
    if len(mine) != len(theirs):
        raise ConfigError(
            f"this replica has prepared or registered {len(mine)} {what.replace('_', ' ')}, the others {len(theirs)}: "
            f"prepare and register the same objects in the same order on all replicas, before the first step"
        )
