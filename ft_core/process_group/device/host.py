"""`ProcessHost`: what a device group needs of its process: threads, a clock, a deadline, an end.

Everything that blocks on a device runs on a thread of its own, and the deadline of an abort on another one, which
touches nothing but a clock: it must come true also where the driver's own lock is held by what is stuck. It needs
Python's lock. Where somebody keeps that in a call of C's, a child process kills this one BACKSTOP_S later
(`backstop`), without a line in the log. Both begin when the abort is wanted: whoever keeps the lock before that keeps
this process from noticing anything, and is ended by its supervisor.

Threads: any. Those started here are daemons named `ft-device-*`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

from ft_core.process_group.device.backstop import Backstop

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

ABORT = "ft-device-abort"
"""Name of the threads that abort a communicator."""
EXIT_STUCK = 75
"""The exit code of a process whose device cannot be got back (EX_TEMPFAIL: start it again)."""
BACKSTOP_S = 1.0
"""How long after a deadline this process is killed, if it has not been able to end itself."""


class Host(Protocol):
    """What a device group needs of its process."""

    def now(self) -> float:
        """Return the time, in seconds of a clock that never goes back."""
        ...

    def start(self, name: str, do: Callable[[], None]) -> None:
        """Run `do` on a thread of its own."""
        ...

    def after(self, seconds: float, do: Callable[[], None]) -> Callable[[], None]:
        """Run `do` once after `seconds`, whatever blocks meanwhile; returns what takes it back, which is idempotent.

        `do` ends this process, or returns because that is not necessary any more.
        """
        ...

    def end_process(self, reason: str) -> None:
        """End this process, at once."""
        ...


class ProcessHost:
    """The real one."""

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def start(self, name: str, do: Callable[[], None]) -> None:
        """Run `do` on a daemon thread.

        Where the interpreter ends, and starts none any more, on this one, but for an abort: that may block for ever.
        """
        if not self._starts(name, do) and name != ABORT:
            do()

    def after(self, seconds: float, do: Callable[[], None]) -> Callable[[], None]:
        """Run `do` on a thread of its own, which ends when it is taken back; if that cannot run, be killed."""
        taken_back, backstop = threading.Event(), Backstop(seconds + BACKSTOP_S)

        def take_back() -> None:
            taken_back.set()
            backstop.take_back()

        def wait() -> None:
            if not taken_back.wait(seconds):
                do()
                take_back()

        self._starts("ft-device-deadline", wait)  # if not: the end of the interpreter has a limit of its own
        return take_back

    def _starts(self, name: str, do: Callable[[], None]) -> bool:
        """Start a thread; False if the interpreter ends. Where the machine has none left, nothing can be aborted."""
        try:
            threading.Thread(target=do, name=name, daemon=True).start()
        except RuntimeError as error:
            if "shutdown" in str(error):
                return False
            self.end_process(f"no thread can be started to look after a device: {error}")
        return True

    def end_process(self, reason: str) -> None:
        """Log one line and leave, without a destructor: one that touches the device would not return."""
        logger.critical("%s; this process ends with status %d, to be started again", reason, EXIT_STUCK)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(EXIT_STUCK)


process_host = ProcessHost()
