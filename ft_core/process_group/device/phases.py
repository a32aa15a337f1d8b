"""`Lifecycle`: what a communicator may be asked to do, from its forming to its end.

How it works. A communicator of a device knows four calls: init, launch, query, abort. Two things about it are fatal: to
abort it while another call is inside it, and to launch on it once the abort has begun. So every call passes here
first. `enter` and `leave` are around each launch; init counts as inside from the beginning. `abort` latches the error
and closes the way in at once, and the communicator's own abort (`CallAbort`) is called for when nothing is inside any
more: immediately, or by the `leave` of what was.

The abort has `abort_s` from the moment it was wanted; after that nobody can say what its kernels still write to, and
the process has to end (`EndProcess`). What is given up while it forms has no such limit: no kernel of it writes to
anybody's tensors, its thread is left behind, and its abort is called for when init has returned.

Invariants: the error is the first one and stays, and is there before `CallAbort` is returned: whoever saw a collective
end that the abort has cut short finds it. `CallAbort` is returned at most once, never while something is inside;
nothing enters after an abort was wanted. Pure: no clock, thread or torch; times are float seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where a communicator is."""

    FORMING = "forming"
    """Its init is inside."""
    READY = "ready"
    """It may be launched on."""
    FAILED = "failed"
    """Its init, a launch or a collective has failed; it is about to be aborted."""
    ABORTING = "aborting"
    """Its abort is wanted, or under way."""
    ABORTED = "aborted"
    """Its abort has returned: nothing of it runs any more."""
    STUCK = "stuck"
    """Its abort did not return in time, or could not end what runs: this process has to end."""


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.READY, Phase.FAILED, Phase.ABORTING}),
    Phase.READY: frozenset({Phase.FAILED, Phase.ABORTING}),
    Phase.FAILED: frozenset({Phase.ABORTING}),
    Phase.ABORTING: frozenset({Phase.ABORTED, Phase.STUCK}),
    Phase.ABORTED: frozenset(),
    Phase.STUCK: frozenset(),
}


@dataclass(frozen=True)
class CallAbort:
    """Call the communicator's abort, on a thread of its own."""


@dataclass(frozen=True)
class WatchDeadline:
    """Send `tick` at this time, whatever blocks meanwhile."""

    at: float


@dataclass(frozen=True)
class EndProcess:
    """End this process: its supervisor starts the group again."""

    reason: str


Action = CallAbort | WatchDeadline | EndProcess
NOTHING: tuple[Action, ...] = ()


class Lifecycle:
    """The state of one communicator; see the file's header. The caller holds a lock around each call."""

    def __init__(self, abort_s: float) -> None:
        self.phase = Phase.FORMING
        self.error: Exception | None = None
        """The first error, an abort included."""
        self.inside = True
        """Whether a call is inside the communicator: its init, or a launch."""
        self.abort_called = False
        """Whether `CallAbort` was returned."""
        self.deadline: float | None = None
        """When its abort has to have returned."""
        self._abort_s = abort_s
        self._is_init = True
        """Whether what is inside is its init."""

    def __repr__(self) -> str:
        inside = ", something inside" if self.inside else ""
        return f"Lifecycle({self.phase.value}{inside}, error={self.error!r})"

    @property
    def ending(self) -> bool:
        """Its abort is under way, or called for as soon as the launch that is inside has returned."""
        return self.phase is Phase.ABORTING and not (self.inside and self._is_init)

    @property
    def over(self) -> bool:
        """Nothing is going to be called on it any more."""
        return self.phase in (Phase.ABORTED, Phase.STUCK)

    def formed(self, now: float) -> tuple[Action, ...]:
        """Its init has returned; it is ready, unless it was given up meanwhile."""
        if self.phase is Phase.FORMING:
            self._go(Phase.READY)
        return self.leave(now)

    def enter(self) -> bool:
        """Whether a launch may begin; if so it is inside until `leave`."""
        if self.phase is not Phase.READY or self.inside:
            return False
        self.inside = True
        return True

    def leave(self, now: float) -> tuple[Action, ...]:
        """What was inside has returned, or raised."""
        self.inside = self._is_init = False
        return self._call_abort(now) if self.phase is Phase.ABORTING else NOTHING

    def failed(self, error: Exception) -> bool:
        """Latch what the communicator or a collective failed with. Returns whether it is now to be aborted."""
        if self.phase not in (Phase.FORMING, Phase.READY):
            return False
        self.error = error
        self._go(Phase.FAILED)
        return True

    def abort(self, error: Exception, now: float) -> tuple[Action, ...]:
        """End it. Idempotent: the first reason stays."""
        if self.phase in (Phase.ABORTING, Phase.ABORTED, Phase.STUCK):
            return NOTHING
        if self.error is None:
            self.error = error
        self._go(Phase.ABORTING)
        if not self.inside:
            return self._call_abort(now)
        return NOTHING if self._is_init else self._begin_deadline(now)

    def abort_ended(self, problem: Exception | None, *, runs: bool) -> tuple[Action, ...]:
        """The communicator's abort has returned, or raised `problem`; `runs`: a collective has not ended."""
        if self.phase is not Phase.ABORTING:
            return NOTHING
        if problem is not None and runs:
            self._go(Phase.STUCK)
            return (EndProcess(f"its abort failed ({problem}) while a collective ran"),)
        self._go(Phase.ABORTED)
        return NOTHING

    def tick(self, now: float) -> tuple[Action, ...]:
        """Time has passed."""
        if self.phase is not Phase.ABORTING or self.deadline is None or now < self.deadline:
            return NOTHING
        self._go(Phase.STUCK)
        blocked = "a launch does not return" if self.inside else "its abort has not returned"
        return (EndProcess(f"{blocked} {self._abort_s:.1f} s after it was to be aborted"),)

    def validate(self) -> None:
        """Check what must always hold."""
        ended = self.phase in (Phase.ABORTING, Phase.ABORTED, Phase.STUCK)
        assert self.error is not None or self.phase in (Phase.FORMING, Phase.READY), self
        assert not self.abort_called or (ended and not self.inside), self
        assert self.phase is not Phase.ABORTED or self.abort_called, self
        assert self.phase is not Phase.FORMING or self.inside, self

    def _call_abort(self, now: float) -> tuple[Action, ...]:
        if self.abort_called:
            return NOTHING
        self.abort_called = True
        return (*self._begin_deadline(now), CallAbort())

    def _begin_deadline(self, now: float) -> tuple[Action, ...]:
        if self.deadline is not None:
            return NOTHING
        self.deadline = now + self._abort_s
        return (WatchDeadline(self.deadline),)

    def _go(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
