"""`DeviceWork`: the handle of a collective that was launched on a device.

How it works. `wait()` puts the collective before whatever the current stream runs next, and does not block the host.
So it cannot know how the collective ends: one that an abort cuts short ends, with garbage, and nothing tells. What it
raises is what the group knows at that moment, without asking the library, which the group's watch does. Who has to be
sure waits for an event that it records after the last work, and then, in this order, reads the group's `errored()`: the
error is there before an abort begins to end kernels.

Two waits do block the host, until it is done, the group has failed or the time is up: that with a `timeout` of its own,
and that of a barrier, whose meaning it is.

Threads: any. A future is the communicator's own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import Work

from ft_core.errors import CollectiveError
from ft_core.process_group.done_work import NO_TIMEOUT, DoneWork

if TYPE_CHECKING:
    import torch

    from ft_core.process_group.device.communicator import Launched

POLL_FIRST_S = 20e-6
POLL_LAST_S = 0.001


class WorkOwner(Protocol):
    """What a work needs of the group that it runs on: an `Incarnation`."""

    @property
    def error(self) -> Exception | None:
        """The first error of the group that is known."""
        ...

    def first_error(self) -> Exception | None:
        """Return the first error of the group so far, or None: asks the library, and never blocks."""
        ...

    def refusal(self, error: Exception) -> Exception:
        """Return what to raise where a work meets that error."""
        ...


class DeviceWork(Work):
    """One collective that was launched.

    `blocks`: waiting for it blocks the host (a barrier).
    """

    def __init__(self, name: str, launched: Launched, owner: WorkOwner, *, blocks: bool = False) -> None:
        super().__init__()
        self._name = name
        self._launched = launched
        self._owner = owner
        self._blocks = blocks
        self._ended_well = False

    def __repr__(self) -> str:
        state = "running" if self.is_running else "done" if self.exception() is None else "failed"
        return f"DeviceWork({self._name}, {state})"

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Have the current stream continue after it; CollectiveError if its group is known to have failed."""
        if self._ended_well:
            self._launched.order()
            return True
        if timeout or self._blocks:
            self._block_host(timeout)
        self._launched.order()  # also before raising: what the caller does next with the tensors comes after it
        error = self._owner.error
        if error is not None:
            raise self._owner.refusal(error)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors; it fails only if the group is known to have failed."""
        error = self._owner.first_error()
        if error is not None and not self._ended_well:
            return DoneWork(None, self._owner.refusal(error)).get_future()
        return self._launched.future()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended on the device; asks nothing else, and changes nothing."""
        return not self._launched.is_done()

    def is_completed(self) -> bool:
        """Whether it has ended on the device; never blocks."""
        if not self._launched.is_done():
            return False
        # In this order: an abort that cut it short had set the error before.
        if not self._ended_well and self._owner.first_error() is None:
            self._ended_well = True
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._ended_well

    def exception(self) -> Any:
        """Return the group's failure if it has ended and was not seen to end well, or None; never blocks."""
        if not self.is_completed() or self._ended_well:
            return None
        error = self._owner.first_error()
        return None if error is None else self._owner.refusal(error)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._launched.result()

    def synchronize(self) -> None:
        """Have the current stream continue after it."""
        self._launched.order()

    def block_current_stream(self) -> None:
        """Do as `synchronize`."""
        self._launched.order()

    def _block_host(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        pause_s = POLL_FIRST_S
        while not self.is_completed() and self._owner.first_error() is None:
            if deadline is not None and time.monotonic() > deadline:
                # Says nothing about the collective: not an error of the group.
                raise CollectiveError(f"{self._name} was not done within {timeout.total_seconds():.3f} s")
            time.sleep(pause_s)
            pause_s = min(POLL_LAST_S, pause_s * 1.5)
