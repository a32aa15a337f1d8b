"""`InsideGroup`: how the ranks of one replica group reach each other, and what they agree on among themselves.

How it works. With several ranks gradients go through `reduction.group_reducer`: summed over the group in shards, each
shard over the groups on the ring of its rank. For that it opens a process group of its own, once per process group of
the job: the script's collectives must not pair with those of a backward, which other ranks may launch earlier or later.

With one rank the divisor is the sum of weights that the ring's commit vote found (R10: gradients are divided by what
was contributed), which may differ from the planned one; so gradients are corrected before they are used.

Invariant: all ranks of the group make the same calls in the same order. Threads: the training thread; `exchange` and
`gather` on the thread that runs backward.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

from ft_core.errors import UsageError
from ft_core.loop.shared_tensors import share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ft_core.loop.trained_model import TrainedModel
    from ft_core.reduction.interface import InsideWork, PendingWork, RoundMember
    from ft_core.runtime.step_attempt import StepAttempt

_opened: list[weakref.ref[ProcessGroup]] = []
"""The process group of the job for which one was opened last, and that one."""

TAGS = 1 << 20
"""After so many gathers the tags of their messages begin anew."""


class _All:
    """Several works as one."""

    def __init__(self, works: Sequence[PendingWork]) -> None:
        self._works = works

    def wait(self) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        return True


class InsideGroup:
    """The ranks of one replica group, in one run.

    Args:
        ranks: processes of this replica group.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._group: ProcessGroup | None = None
        self.reducers: list[RoundMember] = []
        """Those of all models, in the order in which they were wrapped, the same on all ranks."""
        self._tag = 0
        """Of the last gather's messages: the same on all ranks."""
        self._nothing = torch.zeros(ranks), torch.zeros(ranks)
        self._final: object = None
        """The verdict for which gradients were made final."""
        self._planned: tuple[StepAttempt | None, int] = None, 1
        """The attempt, and by which number of participants its gradients are divided."""

    def __repr__(self) -> str:
        return f"InsideGroup({self.ranks} ranks)"

    # ------------------------------------------------------------ gradients

    def open(self) -> None:
        """Open the process group for gradients, with several ranks.

        Raises:
            UsageError: there is no process group of torch.distributed yet.
        """
        if self.ranks > 1 and self._group is None:
            whole = torch.distributed.group.WORLD
            if whole is None:
                raise UsageError(
                    f"a replica group of {self.ranks} ranks: call torch.distributed.init_process_group first"
                )
            group = _opened[1]() if _opened and _opened[0]() is whole else None
            if group is None:
                group = torch.distributed.new_group()
                assert group is not None
                _opened[:] = [weakref.ref(whole), weakref.ref(group)]
            self._group = group

    @property
    def rank(self) -> int:
        """Of this process in its group."""
        assert self._group is not None
        return self._group.rank()

    def share(self, shapes: Sequence[tuple[int, torch.dtype]]) -> list[list[Tensor]] | None:
        """Flat CPU tensors of zeros of each rank, which all ranks see; None if they are not on one machine."""

        def gather(row: Tensor) -> Tensor:
            rows = row.new_zeros(self.ranks * row.numel())
            self.gather(rows, row).wait()
            return rows

        return share(shapes, self.ranks, gather)

    def begun_anywhere(self) -> list[bool]:
        """Of which of `reducers` any rank has begun a reduction. All ranks ask at the same time."""
        mine = torch.tensor([reducer.begun for reducer in self.reducers], dtype=torch.int64)
        everybodys = mine.new_zeros(self.ranks * len(mine))
        self.gather(everybodys, mine).wait()
        return [bool(flag) for flag in everybodys.view(self.ranks, -1).any(0)]

    def meet(self) -> InsideWork:
        """Ends when all ranks have called it: what they wrote into shared tensors before is to be seen."""
        return self.exchange(*self._nothing)

    def exchange(self, received: Tensor, sent: Tensor) -> InsideWork:
        """Send the i-th of `ranks` equal parts to rank i; `received` has one part from each rank."""
        assert self._group is not None
        work: InsideWork = self._group.alltoall_base(received, sent, [], [])
        return work

    def gather(self, whole: Tensor, part: Tensor) -> PendingWork:
        """Fill `whole` with the parts of all ranks, in their order."""
        group = self._group
        assert group is not None
        if whole.device.type != "cpu":
            work: PendingWork = group._allgather_base(whole, part)
            return work
        # Gloo's own gathers into memory of its own and copies.
        parts, mine = whole.view(self.ranks, -1), group.rank()
        self._tag = (self._tag + 1) % TAGS
        peers = [(mine + step) % self.ranks for step in range(1, self.ranks)]
        works = [group.recv([parts[peer]], peer, self._tag) for peer in reversed(peers)]
        works += [group.send([part], peer, self._tag) for peer in peers]
        parts[mine].copy_(part)
        return _All(works)

    def settle(self, attempt: StepAttempt | None, models: Sequence[TrainedModel]) -> None:
        """Make the gradients of `attempt` final, before they are clipped, unscaled or used.

        With several ranks those of a `GroupModel` are, once backward has returned.
        """
        if attempt is None or (attempt.verdict is not None and attempt.verdict is self._final):
            return  # clipping and the step ask again
        if self.ranks > 1 and not any(model.sharded for model in models):
            return
        if any(model.gradient_reducer.unsettled for model in models):
            self._rescale(attempt, models)
            self._final = attempt.verdict

    def _rescale(self, attempt: StepAttempt, models: Sequence[TrainedModel]) -> None:
        if attempt is not self._planned[0]:
            self._planned = attempt, attempt.planned
        weight = attempt.verdict.weight if attempt.verdict is not None else 0
        if weight:
            if weight != self._planned[1]:
                for model in models:
                    model.gradient_reducer.rescale(self._planned[1] / weight)
                self._planned = attempt, weight
            attempt.planned = weight

    # ------------------------------------------------------------ the rest

    def share_buffers(self, models: Sequence[TrainedModel]) -> None:
        """Give all ranks the buffers of the group's first one, as torch's DDP does: each ring has its own."""
        if self.ranks > 1:
            for model in models:
                for buffer in model.buffers() if model.broadcast_buffers else ():
                    torch.distributed.broadcast(buffer, 0)

    def minimum(self, number: int, device: torch.device) -> int:
        """The smallest number of any rank."""
        return self._reduce(number, device, ReduceOp.MIN)

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether it is so on any rank."""
        return bool(self._reduce(int(here), device, ReduceOp.MAX))

    def _reduce(self, number: int, device: torch.device, operation: ReduceOp.RedOpType) -> int:
        if self.ranks == 1:
            return number
        inside = torch.tensor([number], device=device)
        torch.distributed.all_reduce(inside, operation)
        return int(inside)
