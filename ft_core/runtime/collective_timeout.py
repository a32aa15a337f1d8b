"""One thread that turns a deadline into a call, for waits that the code waiting cannot end itself.

A collective over Gloo waits for a silent peer as long as its own timeout says; ours is large, because a peer may
legitimately be busy (`Manager.pause`). The watchdog ends the wait instead: `arm(deadline)` is a plain attribute
store (no
wake-up, no lock: it runs in every step), the thread looks at the attribute when the last deadline it knew has passed.

A wait that has lasted for IDLE_S or up to twice as long, and has as long to go, is looked into every IDLE_S (`look`).

Invariant: `fire` runs on the watchdog thread, at most once per armed deadline, never after `stop` returned.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
IDLE_S = 5.0
"""How often an unarmed watchdog looks whether it has been armed: deadlines are longer than this or wake it."""


class Watchdog:
    """Calls `fire` when an armed deadline passes. Times are `time.monotonic()` seconds."""

    def __init__(self, name: str, fire: Callable[[], float | None], look: Callable[[], None] = lambda: None) -> None:
        self.deadline: float | None = None
        self._fire = fire
        self._look = look
        self._looked_at: float | None = None
        """The deadline that stood when the thread last looked: one that still stands has been armed for long."""
        self._name = name
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._next_look = 0.0
        self._disarmed = 0
        """How often it was disarmed, so that a deadline that is put off does not come back over a disarm."""

    def __repr__(self) -> str:
        return f"Watchdog({self._name}, deadline={self.deadline})"

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"ft-watchdog-{self._name}", daemon=True)
        self._thread.start()

    def arm(self, deadline: float) -> None:
        """Fire at `deadline` unless disarmed before."""
        self.deadline = deadline
        if deadline < self._next_look:
            self._wake.set()

    def disarm(self) -> None:
        """Forget the deadline."""
        self.deadline = None
        self._disarmed += 1

    def stop(self) -> None:
        """End the thread (unless called on it)."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped:
            now, deadline = time.monotonic(), self.deadline
            if deadline is not None and now >= deadline:
                if self.deadline is not deadline:
                    continue  # disarmed or armed anew since it was read
                self.deadline, disarmed = None, self._disarmed
                try:
                    # `fire` may put the deadline off (a peer has announced a pause) by returning a later one.
                    later = self._fire()
                    if later is not None and self._disarmed == disarmed:
                        self.deadline = later
                except Exception:  # noqa: BLE001 - the thread must survive, and the cause must be seen
                    _log.exception("watchdog %s failed", self._name)
                continue
            if deadline is not None and deadline is self._looked_at and deadline - now > IDLE_S:
                self._looked_at = None
                try:
                    self._look()
                except Exception:  # noqa: BLE001 - as above
                    _log.exception("watchdog %s failed", self._name)
                continue
            if now >= self._next_look:
                self._looked_at = deadline
            wait = IDLE_S if deadline is None else min(IDLE_S, deadline - now)
            self._next_look = now + wait
            self._wake.wait(wait)
            self._wake.clear()
