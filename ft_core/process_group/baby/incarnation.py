"""`Incarnation`: one group in one child process, from its forming to the child's end; a `ProcessGroupBaby` has one.

How it works. `form` takes a child and sends it where to meet the others. A collective is packed (parcel.py) and sent; a
reader thread takes the child's reports, copies results back and ends works. The child sends copies of its connections'
descriptors once it has formed: so this process can tell when a peer is gone, the witness can end them, and `abort` can
shut them down, which reaches the peers also where the child is frozen. `abort` does that, kills the child (-9) and
returns; works whose tensors were copied fail at once, those on which the child works in place when it is seen dead.

What ends a group: `abort`; the child's end, whoever caused it; a child that reports nothing for longer than any
collective may take. Each is a CollectiveError that says so. A collective that failed in the child is the group's first
error as well; the child is left, and the connections are ended: what the child closes is kept open by the copies.

Invariants: `error` is the first error, and stays. After an abort nothing is sent, nothing is copied back, and no result
of the child counts. Memory is reused only when the child is dead or has reported a good end; if it is not dead after
DEATH_WAIT_S (a driver holds it), its memory is dropped instead. `form` returns when the child of the group before is
dead, for the same time at most: until then that may write to tensors that nobody waits for. At most MAX_IN_FLIGHT works
are pending.

Threads: `form` and `abort` from any; `launch` from one at a time; the reader is "ft-baby-<replica>". `_lock` guards the
state and is never held across a call that can block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.errors import CollectiveError, FaultToleranceError, UsageError
from ft_core.process_group.baby import children as processes
from ft_core.process_group.baby import collectives
from ft_core.process_group.baby.child import (
    CONFIGURE,
    DONE,
    FAILED,
    FORMED,
    FORMING_FAILED,
    HELLO,
    LAUNCH,
    SET_TIMEOUT,
    as_received,
)
from ft_core.process_group.baby.descriptors import readable
from ft_core.process_group.baby.parcel import Known, Parcel
from ft_core.process_group.baby.work import BabyWork, overdue_at
from ft_core.process_group.fork_safety import close_in_child

if TYPE_CHECKING:
    from ft_core.process_group.baby.children import Child
    from ft_core.process_group.baby.segments import SegmentPool
    from ft_core.process_group.spec import Spec

logger = logging.getLogger(__name__)

START_S = 60.0
"""How long a child may take to start, on top of the timeout of forming: on a loaded machine torch's import does."""
GRACE_S = 5.0
"""How long after its timeout a collective may still be reported as failed by the child."""
DEATH_WAIT_S = 5.0
"""How long a killed child may take to be gone before its works fail all the same."""
POLL_S = 0.01
"""How late a group that waits for the child before it may notice that it should end."""
LOOK_S = 1.0
"""How often the reader looks whether a child that has something to do is silent for too long."""
MAX_IN_FLIGHT = 4096
ENVIRONMENT = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "FT_", "CCL_")
"""Variables of these names go to the child as they are when the group is configured, not when the helper started."""

_live: weakref.WeakSet[Incarnation] = weakref.WeakSet()


@dataclass(frozen=True)
class Inner:
    """The group that runs in the child."""

    kind: str
    """Its class in ft_core.process_group."""
    arguments: dict[str, Any]
    """What it is constructed with, besides the timeout."""
    on_device: bool


@dataclass
class _Pending:
    work: BabyWork
    parcel: Parcel
    launched_at: float
    timeout_s: float


class Incarnation:
    """One group in one child; see the file's header. `before`: the group that it replaces."""

    def __init__(self, spec: Spec, inner: Inner, pool: SegmentPool, before: Incarnation | None = None) -> None:
        self.spec = spec
        self._inner = inner
        self._before = before
        self.error: Exception | None = None
        self.aborted = False
        self.formed = False
        self.child: Child | None = None
        self._pool = pool
        self._known = Known()
        self._timeout_s = spec.timeout_s
        self._lock = threading.Lock()
        self._started = threading.Event()  # the child is there, or has ended
        self._settled = threading.Event()  # formed, failed or aborted: wakes form()
        self._pending: dict[int, _Pending] = {}
        self._unsafe: list[Parcel] = []
        self._last_number = 0
        self._last_report = 0.0
        self._connections: list[socket.socket] = []
        self._reader: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "aborted" if self.aborted else "formed" if self.formed else "forming"
        return f"Incarnation({self.spec.place}, {state}, {self.child})"

    @property
    def is_forming(self) -> bool:
        """Whether it is neither formed nor over."""
        return not self.formed and not self.aborted

    # ---------------------------------------------------------------------------------------------------------- forming

    def form(self) -> None:
        """Form the group in a child; raises what the inner group's configure raises, and what `abort` was given."""
        spec, inner = self.spec, self._inner
        child = processes.children.take()
        name = f"ft-baby-{spec.replica_id}"
        reader = threading.Thread(target=self._read, args=(child,), name=name, daemon=True)
        with self._lock:
            taken = not self.aborted
            if taken:
                self.child, self._reader = child, reader
                _live.add(self)
                reader.start()
        if not taken:
            child.kill()
            child.close()
            raise self.refusal()
        environment = {key: value for key, value in os.environ.items() if key.startswith(ENVIRONMENT)}
        place = (spec.store_addr, spec.replica_id, spec.rank, spec.world_size)
        with contextlib.suppress(OSError):  # it has died, which the reader sees
            arguments = {"timeout": spec.timeout, **inner.arguments}
            child.channel.send((CONFIGURE, inner.kind, arguments, environment, place))
        if not self._started.wait(START_S):
            processes.children.replace_helper()
            self.abort(CollectiveError(f"{self.spec} did not form: no child process started within {START_S:g} s"))
        # The child itself gives up at the timeout; this is for one that cannot.
        if not self._settled.wait(self._timeout_s + GRACE_S):
            silent = f"its child process {child.pid} does not answer (is it stopped?)"
            self.abort(CollectiveError(f"{self.spec} did not form: {silent}"))
        while self._before is not None and not self.aborted:
            self._before.abort(CollectiveError(f"{self._before.spec} has ended: another group takes its place"))
            if self._before.wait_gone(POLL_S):
                self._before = None
        if self.aborted:
            raise self.refusal()

    # ---------------------------------------------------------------------------------------------------------- running

    def launch(self, name: str, arguments: Sequence[Any]) -> BabyWork:
        """Send a collective to the child and return its work. Raises CollectiveError once the group has ended.

        Raises UsageError for one more than MAX_IN_FLIGHT; the group is as good as before.
        """
        child = self.child
        if self.aborted or child is None or not self.formed:
            raise self.refusal()
        if len(self._pending) >= MAX_IN_FLIGHT:  # before anything of it counts as known to the child
            raise UsageError(
                f"{MAX_IN_FLIGHT} collectives are in flight on {self.spec}: wait for some of them, then launch {name}"
            )
        call, tensors = collectives.flatten(name, arguments)
        parcel = Parcel(tensors, call.roles, on_device=self._inner.on_device)
        try:
            manifest, fds = parcel.pack(self._pool, self._known)
        except BaseException:
            parcel.release(self._pool, certain=True)
            raise
        work = BabyWork(name, collectives.outputs(name, arguments), self.spec)
        pending = _Pending(work, parcel, time.monotonic(), collectives.longest_timeout_s(arguments, self._timeout_s))
        try:
            number = self._enter(pending)
        except Exception:
            parcel.release(self._pool, certain=False)  # it may be a segment that the child was to be sent
            raise
        try:
            child.channel.send((LAUNCH, number, call, manifest), fds)
        except OSError:  # it has ended: the reader fails the work
            logger.debug("%s is gone", child)
        return work

    def _enter(self, pending: _Pending) -> int:
        with self._lock:
            if self.aborted:
                raise self.refusal()
            self._last_number += 1
            self._pending[self._last_number] = pending
            return self._last_number

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives launched from now on may take."""
        self._timeout_s = timeout.total_seconds()
        child = self.child
        if child is not None and not self.aborted:
            with contextlib.suppress(OSError):
                child.channel.send((SET_TIMEOUT, timeout))

    def connection_fds(self) -> list[int]:
        """Return this process's descriptors of the child's connections to its peers."""
        return [] if self.aborted else [fd for end in list(self._connections) if (fd := end.fileno()) >= 0]

    @property
    def in_flight(self) -> int:
        """How many works have not ended."""
        return len(self._pending)

    def refusal(self) -> Exception:
        """Return what a call on an incarnation that cannot be used raises."""
        if isinstance(self.error, FaultToleranceError):
            return self.error
        return CollectiveError(f"{self.spec} was aborted: {self.error or 'configure() it again'}")

    def first_error(self) -> Exception | None:
        """Return the first error so far."""
        with self._lock:
            return self.error

    # ----------------------------------------------------------------------------------------------------------- ending

    def abort(self, reason: Exception) -> None:
        """End it: the child is killed, peers are told, works fail within milliseconds. The first reason stays."""
        with self._lock:
            if self.aborted:
                return
            self.aborted = True
            if self.error is None:
                self.error = reason
            child = self.child
        self._started.set()
        self._settled.set()
        self._end_connections()
        if child is not None:
            child.kill()

    def _end_connections(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Kill the child, from a finalizer: takes no lock that could be held by the thread it interrupts."""
        child = self.child
        if child is not None and not self.aborted:
            child.kill()

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the child is dead and everything is given back; whether that came true in time.

        And the one before it, if this one was given up while it waited for that.
        """
        before = self._before
        if before is not None and not before.wait_gone(timeout_s):
            return False
        reader = self._reader
        if reader is None or reader is threading.current_thread():
            return True
        reader.join(timeout_s)
        return not reader.is_alive()

    def fds(self) -> list[int]:
        """Return all descriptors, for a forked process to drop."""
        child = self.child
        return [*self.connection_fds(), *([] if child is None else child.fds())]

    def become_child(self) -> None:
        """In a forked process: never usable, and never ends what belongs to the parent."""
        self._lock = threading.Lock()
        self.aborted = True
        self.error = CollectiveError(f"{self.spec} belongs to the process that this one was forked from")
        self.child = None
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.work._error = self.error
            each.work._ended = threading.Event()
            each.work._ended.set()

    # ----------------------------------------------------------------------------------------------- the reader's side

    def _read(self, child: Child) -> None:
        poll = select.poll()
        poll.register(child.channel, select.POLLIN)
        problem: Exception | None = None
        try:
            while True:
                if not poll.poll(LOOK_S * 1000):
                    if self._is_overdue():
                        silent = f"its child process {child.pid} does not answer (is it stopped?)"
                        self.abort(CollectiveError(f"{self.spec} timed out: {silent}"))
                    continue
                received = child.channel.receive()
                if received is None:
                    break
                self._take(child, *received)
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it, and works would wait for ever
            problem = error
        self._after(child, problem)

    def _is_overdue(self) -> bool:
        with self._lock:
            if not self._pending or self.aborted:
                return False
            oldest = next(iter(self._pending.values())).launched_at
            timeout_s = max(pending.timeout_s for pending in self._pending.values())
            return time.monotonic() > overdue_at(oldest, self._last_report, timeout_s, GRACE_S)

    def _take(self, child: Child, message: tuple[Any, ...], fds: list[int]) -> None:
        self._last_report = time.monotonic()
        kind = message[0]
        if kind == HELLO:
            child.is_here(message[1], fds[0])
            self._started.set()
        elif kind == FORMED:
            connections = [socket.socket(fileno=fd) for fd in fds]
            with self._lock:
                self._connections = connections
                self.formed = not self.aborted
            self._settled.set()
        elif kind == FORMING_FAILED:
            self.abort(as_received(message[1]))
        elif kind == DONE:
            self._end(message[1], None, message[2])
        elif kind == FAILED:
            self._end(message[1], as_received(message[2]), None)

    def _end(self, number: int, error: Exception | None, sender: int | None) -> None:
        with self._lock:
            pending = None if self.aborted else self._pending.pop(number, None)
        if pending is None:
            return
        if error is None:
            try:
                pending.parcel.copy_back()
            except RuntimeError as problem:
                error = problem
        if isinstance(error, CollectiveError):
            self._end_connections()
            self._unsafe.append(pending.parcel)  # what broke off may be written to until the child is dead
        else:
            pending.parcel.release(self._pool, certain=True)
        with self._lock:  # whoever sees the work fail finds the group's error, and the other way round
            if isinstance(error, CollectiveError) and self.error is None:
                self.error = error
            pending.work.end(error, sender)
        pending.work.notify()

    def _after(self, child: Child, problem: Exception | None) -> None:
        """The channel has ended: wait for the child's death, then end the works and give everything back."""
        child.kill()  # it may have closed the channel only
        if self.aborted:
            self._fail_pending(copied_only=True)
        dead = child.pidfd < 0 or readable(child.pidfd, DEATH_WAIT_S)
        if problem is not None:
            reason = problem if isinstance(problem, CollectiveError) else CollectiveError(f"{self.spec}: {problem!r}")
        elif self.aborted:
            reason = CollectiveError("aborted")  # the first one stays
        elif child.pid is None:
            reason = CollectiveError(f"{self.spec} has failed: its child process could not be started")
        else:
            how = processes.children.how_died(child.pid) if dead else "does not end, though it was killed"
            reason = CollectiveError(f"{self.spec} has failed: its child process {child.pid} {how}")
        self.abort(reason)
        if not dead:
            logger.warning("child process %s was killed and does not end; its memory is not used again", child.pid)
        self._fail_pending(copied_only=False)
        for parcel in self._unsafe:
            parcel.release(self._pool, certain=dead)
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        child.close()
        _live.discard(self)

    def _fail_pending(self, *, copied_only: bool) -> None:
        with self._lock:
            failed = [number for number, each in self._pending.items() if each.parcel.is_copied or not copied_only]
            pending = [self._pending.pop(number) for number in failed]
        for each in pending:
            self._unsafe.append(each.parcel)
            each.work.end(self._failure(each.work.collective))
            each.work.notify()

    def _failure(self, name: str) -> Exception:
        error = CollectiveError(f"{name} on {self.spec} failed: {self.error}")
        error.__cause__ = self.error
        return error


def _fds_of_all() -> list[int]:
    return [fd for incarnation in list(_live) for fd in incarnation.fds()]


def _after_fork_in_child() -> None:
    for incarnation in list(_live):
        incarnation.become_child()


close_in_child(_fds_of_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
