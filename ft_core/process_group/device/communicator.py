"""`Communicator`: what a device group needs of NCCL, or of whatever else moves its tensors.

One communicator is one formed group: `init` once, then `launch` and `query`, then `abort` once; a new group takes a new
one. It has no destroy: NCCL's is a collective of the machine and never returns once a peer has aborted, so a
communicator is released by aborting it and dropping it.

Rules for the caller, which `phases.Lifecycle` keeps: one call of init, launch and abort at a time; nothing is
launched once abort was called; abort is called once, after init has returned or raised. `query` and the methods of
`Launched` may be called from any thread at any time, and never block the host (`order` excepted where there are no
streams, which is said there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch._C._distributed_c10d import Store


class NothingQueuedError(RuntimeError):
    """A launch was refused, as the communicator had failed before: nothing of it is going to run on the device."""


class Launched(Protocol):
    """One collective that was launched. It keeps the tensors it runs on until it is done."""

    def order(self) -> None:
        """Have the current stream of the device continue after it.

        On memory that has no streams this blocks until it is done, which an abort makes it.
        """
        ...

    def is_done(self) -> bool:
        """Whether it has ended on the device, well or cut short by an abort."""
        ...

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        ...

    def future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors, for callbacks on the device's streams."""
        ...


class Communicator(Protocol):
    """One formed group, as the library that moves the tensors has it."""

    kind: str
    """The library and its version: ranks whose kinds differ are refused."""

    def init(self, store: Store, rank: int, world_size: int, checkpoint: Callable[[], None]) -> None:
        """Connect to the other ranks, which meet in `store`; blocks, on a thread that may be left behind.

        Called once all ranks are known to have come. `checkpoint` raises when it should give up, and is called while
        it waits for what can be interrupted.
        """
        ...

    def launch(self, name: str, *arguments: Any) -> Launched:
        """Start the collective `name` of `ProcessGroup._launch` behind the current stream; does not block the host.

        Raises NothingQueuedError, a ConfigError, ValueError, TypeError or NotImplementedError if nothing was started;
        after any other error nobody knows what runs.
        """
        ...

    def query(self) -> str | None:
        """What has gone wrong with it so far, found without anybody waiting; None if nothing is known."""
        ...

    def abort(self) -> None:
        """End all its kernels, at once; what they leave in the tensors is unspecified. May block, even for ever."""
        ...
