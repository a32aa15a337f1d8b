"""The contract between the Manager and what reduces gradients: who calls whom, when, and what may not happen.

A *reducer* owns the flat gradient buckets of one wrapped module and launches their reductions; the Manager owns the
attempt they belong to. Neither imports the other: both import this file.

How one step goes. `Manager.start_quorum` opens a `ReductionAttempt`. At the first gradient of a backward pass the
reducer takes `ReducerHost.current_attempt()`, calls `ready()` once (it may block until the quorum is configured), then
reads `scale` and, at the last bucket, `is_source`. It calls `launch` for every bucket in plan order and `launch_fence`
for the last one. That is one *reduction*. At the end of backward it waits for all works of the reduction, takes what
the host has to know of the sums from `read`, then calls `fence_arrived`, or `fail` if one of them failed. An attempt
sees several reductions if `backward` runs several times without `no_sync`; the last one's fence counts.
`Manager.should_commit` first calls `GradientReducer.flush`, then decides, then calls exactly one of `committed` and
`vetoed`.

Invariants:
- Within one attempt all members launch the same collectives in the same order; the plan is fixed at construction.
- The methods of `ReductionAttempt` do not raise for a failure of a peer: it is recorded there, spent at the commit.
- After `launch` or `launch_fence` returned None, or after `fail`, the reducer launches nothing more in that attempt.

Threads: `ready`, `launch`, `launch_fence`, `fence_arrived` and `fail` are called on the thread that runs backward (for
CUDA an autograd thread), one at a time. All methods of `GradientReducer` are called on the training thread, never
during forward or backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ft_core.protocol.rank.ballot import FENCE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, dtype

    from ft_core.device import Device
    from ft_core.reduction.bucket_plan import BucketPlan
    from ft_core.reduction.sharded.parameter import ShardedParameter

    Parameter = Tensor | ShardedParameter

__all__ = [
    "FENCE_SLOTS", "AllreduceHost", "GradientReducer", "InsideCollectives", "InsideWork", "PendingWork", "ReducerHost",
    "ReducerManager", "ReductionAttempt",
]  # fmt: skip


class PendingWork(Protocol):
    """What a launch returns; torch.distributed.Work is one."""

    def wait(self) -> object:
        """Block until the collective ended; raises if it failed or was aborted.

        On a group that does not block the host (`ProcessGroup.blocks_host`) it only puts what is queued next behind the
        collective, and raises nothing: `ReductionAttempt.read` tells how it ended.
        """
        ...


class ReductionAttempt(Protocol):
    """One try at a step: the collectives of one fence, opened by Manager.start_quorum."""

    @property
    def number(self) -> int:
        """Distinct per attempt within this process."""
        ...

    def ready(self) -> bool:
        """Block until the quorum is configured; False if the attempt is already broken (nothing may be launched)."""
        ...

    @property
    def scale(self) -> float:
        """What gradients are multiplied with before the sum: 1/participants, or 0.0 if this member does not contribute.

        Read once per reduction, after `ready`.
        """
        ...

    @property
    def leaves(self) -> bool:
        """This member leaves with it: it adds zeros, uses no result, and no other rank of its group need be there."""
        ...

    @property
    def rides(self) -> bool:
        """The ballot rides in the fence of this reducer, the only one; nothing else is launched beside it."""
        ...

    @property
    def members(self) -> int:
        """Members of the quorum; the same on all ranks of a replica group. Read after `ready`."""
        ...

    @property
    def weights(self) -> tuple[int, int]:
        """What a gradient of this member counts as, and its whole step; zeros if it does not contribute.

        Read once per reduction, after `ready`. `scale` is the first, divided by the participants.
        """
        ...

    @property
    def is_source(self) -> bool:
        """Whether this member is the first participant, whose buffers everybody takes."""
        ...

    def launch(self, tensor: Tensor) -> PendingWork | None:
        """Start an asynchronous in-place SUM over the replicas; None when broken."""
        ...

    def launch_fence(self, flat: Tensor, tail: Tensor) -> PendingWork | None:
        """Fill `tail` (FENCE_SLOTS float32 elements inside `flat`), then start the SUM of `flat`; None when broken.

        Called once per reduction, last. May block until a heal is verified or abandoned.
        """
        ...

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor that was reduced, in CPU memory, once its device has it; all works were waited for before.

        Itself, at once, if it is in CPU memory. The wait ends with the attempt. Raises: something that was launched in
        this attempt was cut short, so nothing that was reduced in it may be used.
        """
        ...

    def fence_arrived(self, tail: Tensor) -> None:
        """All works of the reduction completed; `tail`, in CPU memory, holds the sums until the next: read it now."""
        ...

    def fail(self, error: BaseException) -> None:
        """A collective of this attempt failed, or this member cannot take part in it: the attempt is broken."""
        ...

    def report(self, error: BaseException) -> None:
        """This member's gradients are not usable, its collectives are: veto the step, keep the group (report_error)."""
        ...


class InsideWork(PendingWork, Protocol):
    """A collective inside a replica group."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        ...


class RoundMember(Protocol):
    """A reducer of one of several models in a group of several ranks."""

    @property
    def begun(self) -> bool:
        """It has a part in the round that comes next."""
        ...

    def reduce_in_round(self) -> None:
        """Make its reduction with the other ranks of the group, now."""
        ...


class InsideCollectives(Protocol):
    """How the ranks of a replica group reach each other. Every rank makes the same calls in the same order.

    A rank that is lost ends its whole group, so a failure is for good: the calls, or waiting, raise.
    """

    reducers: list[RoundMember]
    """Those of all models, in the order in which they were wrapped, the same on all ranks."""

    def begun_anywhere(self) -> list[bool]:
        """Of which of `reducers` any rank has begun a reduction. All ranks ask at the same time."""
        ...

    @property
    def ranks(self) -> int:
        """Processes of the replica group."""
        ...

    @property
    def rank(self) -> int:
        """Of this process in its group."""
        ...

    def share(self, shapes: Sequence[tuple[int, dtype]]) -> list[list[Tensor]] | None:
        """Flat CPU tensors of zeros of each rank, by elements and dtype, which all ranks see; None if they cannot."""
        ...

    def meet(self) -> InsideWork:
        """Ends when all ranks have called it: what they wrote into shared tensors before is to be seen."""
        ...

    def exchange(self, received: Tensor, sent: Tensor) -> InsideWork:
        """Send the i-th of `ranks` equal parts to rank i; `received` has one part from each rank."""
        ...

    def gather(self, whole: Tensor, part: Tensor) -> PendingWork:
        """Fill `whole` with the parts of all ranks, in their order."""
        ...


class GradientReducer(Protocol):
    """Reduces the gradients of one model; the ballot can ride in its last bucket. Registered at construction."""

    @property
    def plan(self) -> BucketPlan:
        """The parameters and the bucket plan; `plan.digest` is equal on all replicas that can train together."""
        ...

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The parameters that it reduces gradients of, in an order that is the same on all replicas."""
        ...

    def step_opens(self) -> None:
        """A step begins: the model's state may be collected next, on some ranks of the group and not on others."""
        ...

    def flush(self) -> None:
        """Launch whatever the current attempt lacks, with zeros, fence included, and wait. Never raises.

        Does nothing when a reduction of this attempt ended since the last verdict.
        """
        ...

    def rescale(self, factor: float) -> None:
        """Multiply the reduced gradients (the divisor turned out to differ from the plan)."""
        ...

    def committed(self) -> None:
        """The attempt was committed: write the buffers that came with the fence into the module."""
        ...

    def vetoed(self) -> None:
        """The attempt was not committed: give buffers their values before the first forward since the last verdict."""
        ...

    def state_loaded(self) -> None:
        """State was written into the module (a heal): what `vetoed` would restore is void, the module is the truth."""
        ...

    def buffer_storages(self) -> set[int]:
        """Addresses of the storages that forward may change; a donor has to copy these, and only these."""
        ...

    def remove_hooks(self) -> None:
        """Let go of the parameters; gradients are no longer reduced. Idempotent.

        Autograd keeps hooks where no garbage collection sees them: as long as they are there, so are this reducer, its
        host and the model itself.
        """
        ...


class ReducerHost(Protocol):
    """What a reducer and its wrapper need of the Manager: `Manager.hooks`."""

    @property
    def backend(self) -> str:
        """Backend of the process group that gradients are reduced over."""
        ...

    @property
    def through_host(self) -> bool:
        """That group reduces in CPU memory."""
        ...

    def device_of(self, device: torch.device) -> Device:
        """What the host does with the memory of a device."""
        ...

    @property
    def batch_ratio(self) -> float:
        """What the outputs of the next forward are weighed with."""
        ...

    def register_reducer(self, reducer: GradientReducer) -> None:
        """Announce a reducer; raises if it cannot be taken (any more)."""
        ...

    def unregister_reducer(self, reducer: GradientReducer) -> None:
        """Forget a reducer whose module was unwrapped."""
        ...

    def current_attempt(self) -> ReductionAttempt | None:
        """The open attempt; None if start_quorum was never called."""
        ...


class ShardHost(ReducerHost, Protocol):
    """What the reducer of sharded modules needs besides."""

    @property
    def ranks(self) -> int:
        """Processes of this replica group."""
        ...


class ShardManager(Protocol):
    """A Manager, to `fsdp.replicate`."""

    @property
    def hooks(self) -> ShardHost:
        """Where a reducer is registered."""
        ...


class ReducerManager(Protocol):
    """A Manager, to a wrapper that registers a reducer."""

    @property
    def hooks(self) -> ReducerHost:
        """Where it registers it."""
        ...


class AllreduceHost(Protocol):
    """What `PureDistributedDataParallel` needs of the Manager."""

    def allreduce(self, tensor: Tensor) -> PendingWork:
        """Average `tensor` over the participants in place; errors are recorded, not raised."""
        ...
