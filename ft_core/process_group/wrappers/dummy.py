"""`ProcessGroupDummy`: a process group without peers, whose collectives are done when they return.

Of use where a group is demanded and nothing is to be exchanged (wrapping a module in DDP, a group of one, tests).

Invariants: inputs appear in the outputs as if every rank had sent the same (so the values are right for one rank);
reductions in place leave their tensor as it is; it never fails unless aborted. Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ft_core.errors import CollectiveError, ConfigError
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.done_work import DoneWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch.distributed import Work


class ProcessGroupDummy(ProcessGroup):
    """A group of `world` ranks of which only `rank` is there."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        if not 0 <= rank < world:
            raise ConfigError(f"rank={rank}, world={world}: expected 0 <= rank < world")
        self._rank = rank
        self._world = world
        self._aborted = False
        self.configure_count = 0

    def __repr__(self) -> str:
        return f"ProcessGroupDummy(rank {self._rank} of {self._world}{', aborted' if self._aborted else ''})"

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:  # noqa: ARG002
        """Take the rank and size; nothing is contacted."""
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
        self._rank, self._world, self._aborted = rank, world_size, False
        self.configure_count += 1
        self._update_registration(world_size)

    def abort(self) -> None:
        """Make collectives raise until the next configure."""
        self._aborted = True

    def errored(self) -> Exception | None:
        """Return an error after an abort."""
        return CollectiveError("abort() was called on the dummy group") if self._aborted else None

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing takes time here."""

    def shutdown(self) -> None:
        """Unregister this group from c10d."""
        self.unregister()

    def sibling(self) -> ProcessGroupDummy:
        """Return another one."""
        return ProcessGroupDummy(self._rank, self._world)

    def getBackendName(self) -> str:
        """Return the name."""
        return "ft-dummy"

    def size(self) -> int:
        """Return the number of ranks it claims to have."""
        return self._world

    def rank(self) -> int:
        """Return the rank it claims to be."""
        return self._rank

    def _launch(self, name: str, *arguments: Any) -> Work:
        error = self.errored()
        if error is not None:
            raise error
        copy = _COPIES.get(name)
        if copy is not None:
            with torch.no_grad():
                copy(self._rank, *arguments[:2])
        return DoneWork(arguments[0])


def _fill_lists(_rank: int, outputs: Any, inputs: Any) -> None:
    for output, given in zip(outputs, inputs, strict=False):
        for part in output:
            part.copy_(given)


def _fill_coalesced_lists(_rank: int, outputs: Any, inputs: Any) -> None:
    for output in outputs:
        for part, given in zip(output, inputs, strict=True):
            part.copy_(given)


def _fill_repeated(_rank: int, output: torch.Tensor, given: torch.Tensor) -> None:
    for part in torch.split(output.view(-1), given.numel()):
        part.copy_(given.view(-1))


def _fill_own_part(rank: int, output: torch.Tensor, given: torch.Tensor) -> None:
    output.view(-1).copy_(given.view(-1)[rank * output.numel() : (rank + 1) * output.numel()])


def _fill_from_own_list(rank: int, outputs: Any, inputs: Any) -> None:
    for output, parts in zip(outputs, inputs, strict=False):
        output.copy_(parts[rank])


def _fill_pairwise(_rank: int, outputs: Any, inputs: Any) -> None:
    for output, given in zip(outputs, inputs, strict=True):
        output.copy_(given)


def _each(fill: Callable[[int, torch.Tensor, torch.Tensor], None]) -> Callable[..., None]:
    def fill_all(rank: int, outputs: Any, inputs: Any) -> None:
        for output, given in zip(outputs, inputs, strict=True):
            fill(rank, output, given)

    return fill_all


def _copy_whole(_rank: int, output: torch.Tensor, given: torch.Tensor) -> None:
    output.copy_(given)


_COPIES: dict[str, Callable[..., None]] = {
    "allgather": _fill_lists,
    "gather": _fill_lists,
    "allgather_coalesced": _fill_coalesced_lists,
    "_allgather_base": _fill_repeated,
    "allgather_into_tensor_coalesced": _each(_fill_repeated),
    "_reduce_scatter_base": _fill_own_part,
    "reduce_scatter_tensor_coalesced": _each(_fill_own_part),
    "reduce_scatter": _fill_from_own_list,
    "scatter": _fill_from_own_list,
    "alltoall": _fill_pairwise,
    "alltoall_base": _copy_whole,
}
