"""How a replica is asked to end: SIGTERM, and the end of the interpreter.

How it works. The first SIGTERM asks every Manager of this process to drain: finish the step, leave in agreement with
the others, exit with status 0 out of `start_quorum`. Whatever handler was there before is called too. A second SIGTERM
(one that comes more than `SAME_S` later: launchers and schedulers often send it twice) is an impatient operator's: the
disposition from before is restored, and the signal raised again.

The handler runs between two bytecodes of the main thread, which may hold any lock of ours or of the threading module.
So it takes none: it reads attributes, and starts a bare thread for the rest (`threading.Thread.start` takes locks).

Invariants: installed by the main thread only, never over SIG_IGN or over a handler that is not Python's; taken out
again with the last Manager if it is still the one that is installed (a process that ends because of the signal
keeps it: the repetition must not kill it on its last few steps). In a forked child (a DataLoader worker) it ends
the process as if it had never been there.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import FrameType

SAME_S = 1.0
"""SIGTERMs that follow the first one within this time are the same word, said twice."""
RELAY_S = 0.2
"""How long an order to exit takes at most to reach the other ranks of a group."""
EXIT_S = 5.0
"""How long a goodbye may take."""
log = logging.getLogger("ft_core")


class Drains(Protocol):
    """What is asked to end by a signal."""

    def drain(self, reason: str) -> None:
        """Ask all ranks of its group to leave. Any thread; returns at once."""
        ...


class Sigterm:
    """The handler of one process. Called by the signal; everything else on the main thread."""

    def __init__(self, previous: signal._HANDLER) -> None:
        self.targets: tuple[weakref.ref[Drains], ...] = ()
        """Replaced as a whole, so that the handler never sees half a change."""
        self._previous = previous
        self._pid = os.getpid()
        self._first_at = 0.0

    def __repr__(self) -> str:
        return f"Sigterm(targets={len(self.targets)}, previous={self._previous!r})"

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal has arrived."""
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        present: object = signal.getsignal(number)
        if self._same_word():
            return
        if present is self and (self._first_at or not self.targets):
            self.restore()
            signal.raise_signal(number)
            return
        self._first_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the interpreter is ending anyway
            _thread.start_new_thread(_drain_all, (self.targets,))
        if callable(self._previous) and self._previous is not signal.default_int_handler:
            self._previous(number, frame)

    def _same_word(self) -> bool:
        return bool(self._first_at) and time.monotonic() - self._first_at <= SAME_S

    def add(self, target: Drains) -> None:
        """Let the next signal drain this one too."""
        alive = tuple(ref for ref in self.targets if ref() is not None)
        if not alive:
            self._first_at = 0.0
        self.targets = (*alive, weakref.ref(target))

    def remove(self, target: Drains) -> None:
        """This one has ended. After the last one the handler goes too, unless the same word may still be repeated."""
        self.targets = tuple(ref for ref in self.targets if ref() not in (None, target))
        if not self.targets and not self._same_word() and _on_main_thread():
            self.restore()

    def restore(self) -> None:
        """Put back what was there before, if this is still the handler."""
        present: object = signal.getsignal(signal.SIGTERM)
        if present is self:
            signal.signal(signal.SIGTERM, self._previous)

    @staticmethod
    def installed() -> Sigterm | None:
        """This process's handler; a new one if there is none yet; None where SIGTERM is not ours to handle."""
        present = signal.getsignal(signal.SIGTERM)
        if isinstance(present, Sigterm):
            if present._pid == os.getpid():
                return present
            present = present._previous  # that one came with a fork
        if present is None or present is signal.SIG_IGN:
            return None
        handler = Sigterm(present)
        signal.signal(signal.SIGTERM, handler)
        return handler


def on_sigterm(target: Drains) -> None:
    """Let SIGTERM drain this Manager. Does nothing off the main thread, and where SIGTERM is ignored."""
    handler = Sigterm.installed() if _on_main_thread() else None
    if handler is not None:
        handler.add(target)


def forget(target: Drains) -> None:
    """This one has ended."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, Sigterm):
        handler.remove(target)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _drain_all(targets: tuple[weakref.ref[Drains], ...]) -> None:
    for ref in targets:
        target = ref()
        if target is not None:
            target.drain("SIGTERM")


def kill(*, told_first: bool) -> None:
    """End this process whatever it does; `told_first`: leave a moment for passing the order on to the other ranks.

    Not by SIGTERM: that would be a drain, and reaches nobody while the main thread hangs.
    """
    if not told_first:
        os.kill(os.getpid(), signal.SIGKILL)
    timer = threading.Timer(RELAY_S, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


class Ends(Protocol):
    """What is shut down when the interpreter ends."""

    def exit(self, within_s: float) -> None:
        """Leave, quickly."""
        ...


def at_exit(ref: weakref.ref[Ends]) -> None:
    """The interpreter ends: shut it down, quickly."""
    ended = ref()
    if ended is not None:
        with contextlib.suppress(Exception):
            ended.exit(EXIT_S)
