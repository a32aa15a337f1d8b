"""`GroupReducer`: the `BucketReducer` of a replica group of several ranks, which reduces in three stages.

How it works. A complete bucket is cut into a shard per rank. The ranks of the group *exchange* shards, so that each
holds the group's sum of its own one; that *crosses*: it is summed with those of the same rank of the other groups, on
this rank's ring; then the ranks *gather* the shards of all. So a group sends its gradient to the others once, not once
per rank. The ballot of each ring, and this rank's buffers, follow the shard of the last bucket (`plan_inside`). Hooks
begin exchanges; the rest is done at the end of backward, but for shards that could cross earlier: where this is the
only model that is reduced, a shard crosses once its exchange is seen to have ended. With several models the order of
what crosses would then depend on who was faster. With several, nothing is exchanged in hooks either: which gradients
arrive, and when, may differ between the ranks. At the end of a backward the ranks tell each other which models it had
gradients of on any of them (a *round*), and reduce these, one after the other, in the order in which they were wrapped.

Ranks on one machine see each other's buckets and shards (`InsideCollectives.share`): they sum and copy them where they
lie, and only meet instead of sending. With messages inside, two groups of two on two cores need 1.1 to 1.4 times what
Gloo's all-reduce over all four takes: its ring sends no less, but each piece while it is in the cache.

The divisor (R10). Rings may disagree about who takes part, and shards mix the gradients of all rings; so each gradient
counts as its weight, divided by what is the same on all ranks, members times ranks, and the weights themselves travel
as one more summand. If their sum is not members times ranks, the gathered gradients are corrected by it.

Invariants, besides those of the base class:
- All ranks of a group exchange all buckets in plan order, then gather all in plan order, in every reduction that is
  armed, model after model: whatever became of this rank's ring. A ring that is broken lets nothing more cross; its rank
  puts in what it has, and the vote vetoes the step on all ranks of the group. `_broken` stays false: `_ring_broken`
  says it.
- Nobody waits for another rank in a hook, and nobody waits for a ring before all shards have crossed.
- In shared memory: a rank reads another's bucket between the exchange and its own gather, another's shard between the
  gather and its next exchange; so who has gathered may write to its bucket, who has exchanged to its shard.
- A replica that leaves needs nobody of its group for its last fence.
- A failure inside the group is for good (a rank that is lost ends its group): it breaks the attempt, so that the peers
  do not wait, and leaves backward.

Threads: as the base class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ft_core.errors import CollectiveError
from ft_core.reduction.bucket_plan import WEIGHT_DIGIT, WEIGHT_DIGITS, BucketPlan, ShardedPlan, plan_inside
from ft_core.reduction.bucket_reducer import BucketReducer
from ft_core.reduction.flat_buckets import Bucket, FlatGradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ft_core.reduction.bucket_reducer import Allocated
    from ft_core.reduction.buffer_sync import Owners
    from ft_core.reduction.interface import (
        InsideCollectives,
        InsideWork,
        Parameter,
        PendingWork,
        ReducerHost,
        ReductionAttempt,
    )


class GroupReducer(BucketReducer):
    """The reducer of one module in a group of several ranks. `inside`: how they reach each other."""

    def __init__(
        self, manager: ReducerHost, module: nn.Module, parameters: Sequence[Parameter], plan: BucketPlan,
        devices: Sequence[torch.device], buffer_owners: Owners, inside: InsideCollectives,
    ) -> None:  # fmt: skip
        self._inside = inside
        self._ring_broken = False
        self._exchanges: list[InsideWork] = []
        self._crossings: list[PendingWork | None] = []
        """Of the shards in plan order; None: it could not cross."""
        self._divisor = 1
        self._weight = 0
        """Of this member's whole step in this reduction."""
        inside.reducers.append(self)
        plan = ShardedPlan(plan.parameters, plan.buffers, plan.settings, plan.buckets, plan.tail, inside.ranks)
        self._plans = plan_inside(plan)
        super().__init__(manager, module, parameters, plan, devices, buffer_owners)

    def _allocate(self, parameters: Sequence[Parameter], devices: Sequence[torch.device]) -> Allocated:
        plans, inside = self._plans, self._inside
        count, planned, shared = len(plans.summed.buckets), (*plans.summed.buckets, *plans.crossing.buckets), None
        if all(device.type == "cpu" for device in devices):
            with torch.inference_mode(False):
                shared = inside.share([(bucket.numel, getattr(torch, bucket.dtype)) for bucket in planned])
        self._shared = shared is not None
        own = [None] * len(planned) if shared is None else shared[inside.rank]
        device_of = self._manager.device_of
        memory = FlatGradients(plans.summed, parameters, devices, own[:count], device_of)
        crossing = zip(plans.crossing.buckets, own[count:], strict=True)
        self._shards = [Bucket(bucket, devices[bucket.device], flat, device_of) for bucket, flat in crossing]
        """What crosses; `gradients` is the shard alone."""
        tail, last, summed = plans.crossing.tail, self._shards[-1].flat, plans.summed.tail
        with torch.inference_mode(False):
            self._inboxes = [torch.empty_like(bucket.flat) for bucket in memory.buckets if not self._shared]
            self._received = [list(inbox.view(inside.ranks, -1)) for inbox in self._inboxes]
            """Per bucket the parts of all ranks that are to be summed here."""
            self._others: list[list[Tensor]] = []
            """Per bucket the shards of all ranks, where they are seen."""
            for index, bucket in enumerate(plans.crossing.buckets if shared else ()):
                assert shared is not None
                self._received.append([mine[index].view(inside.ranks, -1)[inside.rank] for mine in shared])
                self._others.append([mine[count + index][: bucket.gradients] for mine in shared])
            self._fence = last[tail.fence : tail.fence + tail.fence_slots]
            self._weights = memory.buckets[-1].flat[summed.pieces : summed.end]
            self._sums = memory.buckets[-1].flat[summed.used : summed.end]
            """How many participants used each parameter, where that is counted, and the digits of the weights."""
        memory.buckets[-1].device.reserve(self._sums.nbytes)
        self._shards[-1].device.reserve(self._fence.nbytes)
        return memory, plans.crossing, last

    # ------------------------------------------------------------------------------------------- a reduction begins

    def _start(self, attempt: ReductionAttempt) -> bool:
        again = attempt is self._settled
        was_broken = again and self._ring_broken
        self._reset_all(attempt)
        self._ring_broken = was_broken or not attempt.ready()
        if again and self._ring_broken and not was_broken:
            attempt.fail(CollectiveError("a further backward() of this step could not be reduced"))
        weight, self._weight = (0, 0) if self._ring_broken else attempt.weights
        self._divisor = attempt.members * self._inside.ranks
        self._open_with(weight / self._divisor)
        return True

    def remove_hooks(self) -> None:
        """As the base class; the other models' rounds go on without it."""
        super().remove_hooks()
        if self in self._inside.reducers:
            self._inside.reducers.remove(self)

    def _reset_all(self, attempt: ReductionAttempt) -> None:
        self._reset(attempt)
        self._exchanges.clear()
        self._crossings.clear()

    def _break(self) -> None:
        self._ring_broken = True

    def _drop_unfinished(self) -> None:
        with torch.no_grad():  # the other ranks may be waiting for this one
            self._abandon()

    # ------------------------------------------------------------------------------------------- the three stages

    def _launch(self, index: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        if index == self._bucket_count - 1:
            self._memory.pack_used(self._arrived_tensor if self._scale_value else None)
            digits = [self._weight // WEIGHT_DIGIT**place % WEIGHT_DIGIT for place in range(WEIGHT_DIGITS)]
            self._buckets[-1].device.put(torch.tensor(digits, dtype=torch.float32), self._weights)
        self._next = index + 1
        if len(self._inside.reducers) == 1:
            self._exchange(index)
            while (
                attempt.rides and len(self._crossings) < index and self._exchanges[len(self._crossings)].is_completed()
            ):
                self._cross(attempt)

    def _exchange(self, index: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        try:
            self._buckets[index].join_streams()
            if self._shared:
                self._exchanges.append(self._inside.meet())
            else:
                self._exchanges.append(self._inside.exchange(self._inboxes[index], self._buckets[index].flat))
        except Exception as error:
            attempt.fail(error)
            raise

    def _cross(self, attempt: ReductionAttempt) -> None:
        """Sum the next shard over the group, and let it cross."""
        index = len(self._crossings)
        self._exchanges[index].wait()
        received, shard = self._received[index], self._shards[index]
        with torch.no_grad():
            torch.add(received[0], received[1], out=shard.gradients)
            for part in received[2:]:
                shard.gradients.add_(part)
        self._send(attempt, index)

    def _send(self, attempt: ReductionAttempt, index: int) -> None:
        """Let a shard cross, if the ring can be used."""
        work, shard = None, self._shards[index]
        if not self._ring_broken:
            try:
                if index < self._bucket_count - 1:
                    work = attempt.launch(shard.flat)
                else:
                    self.buffers.pack(source=attempt.is_source)
                    work = attempt.launch_fence(shard.flat, self._fence)
            except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks wait for this one)
                attempt.fail(error)
            self._ring_broken = work is None
        self._crossings.append(work)

    def _finish(self) -> None:
        """The reduction is complete here: end it; with several models, all that the ranks have begun."""
        reducers = self._inside.reducers
        if len(reducers) == 1:
            self._reduce()
            return
        with torch.no_grad():
            for reducer, begun in zip(reducers, self._inside.begun_anywhere(), strict=True):
                if begun:
                    reducer.reduce_in_round()

    @property
    def begun(self) -> bool:
        """It has a part in the round that comes next."""
        return self._open

    def reduce_in_round(self) -> None:
        """Complete this model's reduction with what there is, and make it with the other ranks of the group."""
        attempt = self._manager.current_attempt()
        assert attempt is not None
        if self._open or self._start(attempt):
            self.buffers.gone_through(self._arrived)
            self._fill(with_accumulated=True)
            for index in range(self._bucket_count):
                self._exchange(index)
            self._reduce()
            self._consumed = True

    def _reduce(self) -> None:
        """Let what is left cross, wait for all of it, gather, and close the reduction."""
        attempt = self._attempt
        assert attempt is not None
        gathers: list[PendingWork] = []
        try:
            while len(self._crossings) < self._bucket_count:
                self._cross(attempt)
            for bucket, shard, work in zip(self._buckets, self._shards, self._crossings, strict=True):
                self._wait_for(work, attempt)
                gathers.append(
                    self._inside.meet() if self._shared else self._inside.gather(bucket.flat, shard.gradients)
                )
            self._fence_arrived(attempt)
            for index, gather in enumerate(gathers):
                gather.wait()
                if self._shared:
                    parts = list(self._buckets[index].flat.view(self._inside.ranks, -1))
                    torch._foreach_copy_(parts, self._others[index])
        except Exception as error:
            attempt.fail(error)  # first, so that what crosses ends
            for work in self._crossings:
                self._wait_for(work, attempt)
            raise
        finally:
            self._open = self._deferred = False
            self._reduction.scale = None
            self._settled = attempt
        if not self._ring_broken:
            self._correct(attempt)

    def _wait_for(self, work: PendingWork | None, attempt: ReductionAttempt) -> None:
        if work is not None:
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 (any failed collective breaks the ring, none the process)
                if not self._ring_broken:
                    self._ring_broken = True
                    attempt.fail(error)

    def _fence_arrived(self, attempt: ReductionAttempt) -> None:
        if self._ring_broken:
            return
        try:
            attempt.fence_arrived(attempt.read(self._fence) if attempt.rides else self._fence)
        except Exception as error:  # noqa: BLE001 (the attempt decides what it means)
            attempt.fail(error)
            self._ring_broken = True

    def _correct(self, attempt: ReductionAttempt) -> None:
        """The gathered gradients were divided by members times ranks: divide them by the weights that are in them."""
        try:
            told = attempt.read(self._sums)
        except Exception as error:  # noqa: BLE001 (the ring broke meanwhile: these gradients are nobody's)
            attempt.fail(error)
            self._ring_broken = True
            return
        if not self._scale_value or 0 in self._arrived:  # else this member used them all
            self._memory.forget_unused(None if self._memory.used is None else told[:-WEIGHT_DIGITS])
        digits: list[float] = told[-WEIGHT_DIGITS:].tolist()
        weight = sum(digit * WEIGHT_DIGIT**place for place, digit in enumerate(digits))
        if weight > 0 and weight != self._divisor:  # another ring that is broken may have left anything there
            self._memory.rescale(self._divisor / weight)

    # ------------------------------------------------------------------------------------------- the end

    def _flush(self, attempt: ReductionAttempt, with_accumulated: bool) -> None:
        if attempt.leaves:
            self._leave(attempt)
        else:
            super()._flush(attempt, with_accumulated)

    def _leave(self, attempt: ReductionAttempt) -> None:
        """Let zeros cross on this ring: the other ranks of the group may be where they do not answer."""
        if self._open:  # in the middle of a reduction, which they may never complete
            attempt.fail(CollectiveError("this replica leaves in the middle of a step"))
            self._ring_broken = True
        else:
            self._reset_all(attempt)
            self._ring_broken = not attempt.ready()
            for index, shard in enumerate(self._shards):
                shard.flat.zero_()
                self._send(attempt, index)
        for work in self._crossings:
            self._wait_for(work, attempt)
        self._open, self._reduction.scale, self._settled = False, None, attempt
        self._fence_arrived(attempt)

    def rescale(self, factor: float) -> None:
        """Nothing: the divisor of one ring is not that of the gradients, which are divided already."""
