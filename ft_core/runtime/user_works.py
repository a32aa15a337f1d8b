"""The collectives and futures of the user's that a vote has to wait for: what `Manager.allreduce` launched, and the
futures given to `Manager.wrap_future`.

How it works. A work is kept until its end was seen here, whoever else waits for it; those that ended are dropped from
the head, because collectives of one group end in the order in which they were launched. `should_commit` waits for the
futures before the fence, so that a failure of theirs still vetoes for everybody, and for the works after it: a work
that a peer never launched shows in the fence's tag at once, and would be waited for in vain here. On a group that
does not block the host neither the script's wait nor ours tells how a work ended: the vote waits for the device, too.

Invariants: when a vote is given no work is under way (the tensor that a step is made of is final, or known to be
undefined). A failed work is reported once. Threads: the training thread; `all_ended` is for the watchdog's, too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from ft_core.futures import FutureTimeoutError
from ft_core.runtime.device_wait import outlast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Work
    from torch.futures import Future

    from ft_core.device import Device
    from ft_core.process_group import ProcessGroup

MAX_WORKS = 1024
"""Collectives under way; before one more is launched, the oldest is waited for."""
MAX_FUTURES = 1024
"""Futures under way; before one more is taken, the oldest is waited for."""


class UserWorks:
    """Those of one rank; `report` is called with the error of each collective that failed."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report
        self._works: deque[Work] = deque()
        self._futures: deque[Future[Any]] = deque()
        self._on_devices: dict[ProcessGroup, set[Device]] = {}
        """Where something was launched since the last vote, on groups that do not block the host."""

    def __repr__(self) -> str:
        return f"UserWorks({len(self._works)} collectives, {len(self._futures)} futures)"

    def __bool__(self) -> bool:
        return bool(self._works or self._futures or self._on_devices)

    def add_on_device(self, work: Work, group: ProcessGroup, device: Device) -> None:
        """A collective was launched on a group that does not block the host."""
        self._on_devices.setdefault(group, set()).add(device)
        self.add(work)

    def add(self, work: Work) -> None:
        """A collective was launched."""
        works = self._works
        while works and (len(works) >= MAX_WORKS or works[0].is_completed()):
            self._end(works.popleft())
        works.append(work)

    def add_future(self, future: Future[Any]) -> None:
        """A future that never fails is to be done before the vote."""
        futures = self._futures
        while futures and (len(futures) >= MAX_FUTURES or futures[0].done()):
            futures.popleft().wait()
        futures.append(future)

    def all_ended(self) -> bool:
        """No collective is under way."""
        return all(work.is_completed() for work in list(self._works))

    def wait_futures(self, deadline: float) -> FutureTimeoutError | None:
        """Wait until `deadline` (monotonic s). Returns the error if one of them was not done by then."""
        late = None
        while self._futures:
            future = self._futures.popleft()
            if future.done():
                continue
            done = threading.Event()
            future.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
            if not done.wait(max(0.0, deadline - time.monotonic())):
                late = FutureTimeoutError("a future given to wrap_future was not done when should_commit was called")
        return late

    def wait(self) -> None:
        """Wait for all collectives, however they end. Something else bounds it: the watchdog, or an abort before."""
        while self._works:
            self._end(self._works.popleft())

    def outlast_devices(self, over: Callable[[], Exception | None]) -> None:
        """After `wait`: until the devices have ended them. One that was cut short is reported.

        `over`: why nothing that was launched counts any more, if it is so; then nothing more is waited for.
        """
        launched, self._on_devices = self._on_devices, {}
        for group, devices in launched.items():
            try:
                outlast([device.mark() for device in devices], partial(_cut_short, group, over))
            except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
                self._report(error)

    def forget_devices(self) -> None:
        """The step is broken: nobody uses what they bring."""
        self._on_devices = {}

    def _end(self, work: Work) -> None:
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001 - recorded in the step, spent at the commit
            self._report(error)


def _cut_short(group: ProcessGroup, over: Callable[[], Exception | None]) -> Exception | None:
    return over() or group.errored()
