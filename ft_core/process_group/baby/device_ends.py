"""`DeviceEnds`: when the collectives that a child process runs on a device have ended, so that the parent is told.

How it works. Nobody waits: one thread asks the works in flight, every POLL_S, whether the device has done them; a
question is one of the driver's event queries. So it costs neither a thread per collective nor a core that spins in a
blocking call, and what has ended is reported though one before it has not (a message, say, that a peer sends later).
An error of the group is reported for all that has not ended: it is there before an abort cuts anything short.

Invariants: every work that was added is reported once, DONE only if it is known to have ended well. The parent bounds
how many there are.
Threads: `add` from the one that launches; the rest is "ft-baby-device".
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Work

POLL_S = 0.0001
"""How late an end may be seen; the message to the parent takes as long."""
IDLE_S = 1.0
"""After so long without a work the thread ends; the next work starts another."""


class DeviceEnds:
    """Reports the ends of works.

    `errored`: the group's first error. `report(number, error)`: called for each work, with None if it has ended well.
    """

    def __init__(
        self, errored: Callable[[], Exception | None], report: Callable[[int, Exception | None], None]
    ) -> None:
        self._errored = errored
        self._report = report
        self._running: deque[tuple[int, Work]] = deque()
        self._lock = threading.Lock()
        self._launched = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"DeviceEnds({len(self._running)} in flight)"

    def add(self, number: int, work: Work) -> None:
        """A work was launched."""
        with self._lock:
            self._running.append((number, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ft-baby-device", daemon=True)
                self._thread.start()
        self._launched.set()

    def look(self) -> bool:
        """Report what has ended. Returns whether something has not."""
        error = self._errored()
        for _ in range(len(self._running)):
            number, work = self._running.popleft()
            try:
                ended = work.is_completed()
            except Exception as problem:  # noqa: BLE001 - the device's: raised by the parent's work
                self._report(number, problem)
                continue
            if ended:
                self._report(number, work.exception())
            elif error is not None:
                self._report(number, error)
            else:
                self._running.append((number, work))
        return bool(self._running)

    def _run(self) -> None:
        while True:
            if not self._launched.wait(IDLE_S):
                with self._lock:
                    if not self._running:
                        self._thread = None
                        return
            self._launched.clear()
            while self.look():
                time.sleep(POLL_S)
