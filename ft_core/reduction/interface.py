"""The contract between the Manager and what carries its fence: who calls whom, when, and what may not happen.

A *carrier* owns the flat gradient buckets of one wrapped module and launches their reductions; the Manager owns the
attempt they belong to. Neither imports the other: both import this file.

How one step goes. `Manager.start_quorum` opens an `Attempt`. At the first gradient of a backward pass the carrier takes
`ManagerPort.current_attempt()`, calls `ready()` once (it may block until the quorum is configured), then reads `scale`
and, at the last bucket, `is_source`. It calls `launch` for every bucket in layout order and `launch_fence` for the last
one. That is one *round*. At the end of backward it waits for all works of the round, then calls `fence_arrived`, or
`fail` if one of them failed. An attempt sees several rounds if `backward` runs several times without `no_sync`; the
last round's fence counts. `Manager.should_commit` first calls `Carrier.flush`, then decides, then calls exactly one of
`committed` and `vetoed`.

Invariants:
- Within one attempt all members launch the same collectives in the same order; the layout is fixed at construction.
- The methods of `Attempt` do not raise for a failure of a peer: it is recorded in the attempt, spent at the commit.
- After `launch` or `launch_fence` returned None, or after `fail`, the carrier launches nothing more in that attempt.

Threads: `ready`, `launch`, `launch_fence`, `fence_arrived` and `fail` are called on the thread that runs backward (for
CUDA an autograd thread), one at a time. All methods of `Carrier` are called on the training thread, never during
forward or backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ft_core.protocol.rank.ballot import FENCE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ft_core.reduction.bucket_plan import Layout

__all__ = ["FENCE_SLOTS", "AllreducePort", "Attempt", "Carrier", "ManagerPort", "PendingWork"]


class PendingWork(Protocol):
    """What a launch returns; torch.distributed.Work is one."""

    def wait(self) -> object:
        """Block until the collective ended; raises if it failed or was aborted."""
        ...


class Attempt(Protocol):
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

        Read once per round, after `ready`.
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

        Called once per round, last. May block until a heal is verified or abandoned.
        """
        ...

    def fence_arrived(self, tail: Tensor) -> None:
        """All works of the round completed; `tail` holds the sums. It is overwritten by the next round: read it now."""
        ...

    def fail(self, error: BaseException) -> None:
        """A collective of this attempt failed, or this member cannot take part in it: the attempt is broken."""
        ...

    def report(self, error: BaseException) -> None:
        """This member's gradients are not usable, its collectives are: veto the step, keep the group (report_error)."""
        ...


class Carrier(Protocol):
    """Where a fence can ride: registered with the manager at construction."""

    @property
    def layout(self) -> Layout:
        """The parameters and the bucket plan; `layout.digest` is equal on all replicas that can train together."""
        ...

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters that it reduces gradients of, in an order that is the same on all replicas."""
        ...

    def flush(self) -> None:
        """Launch whatever the current attempt lacks, with zeros, fence included, and wait. Never raises.

        Does nothing when a round of this attempt ended since the last verdict.
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


class ManagerPort(Protocol):
    """What a carrier needs of the Manager. An optional `data_backend: str` names its backend."""

    def register_carrier(self, carrier: Carrier) -> None:
        """Announce a carrier; raises if it cannot be taken (any more)."""
        ...

    def unregister_carrier(self, carrier: Carrier) -> None:
        """Forget a carrier whose module was unwrapped."""
        ...

    def current_attempt(self) -> Attempt | None:
        """The open attempt; None if start_quorum was never called."""
        ...


class AllreducePort(Protocol):
    """What `PureDistributedDataParallel` needs of the Manager."""

    def allreduce(self, tensor: Tensor) -> PendingWork:
        """Average `tensor` over the participants in place; errors are recorded, not raised."""
        ...
