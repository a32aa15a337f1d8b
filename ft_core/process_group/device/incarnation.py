"""`Incarnation`: one group over a communicator, from its forming to its release; a device group has one at a time.

How it works. `form` meets the other ranks and runs the communicator's init on a thread of its own, and waits for it or
for `abort`, whichever is first; a thread that cannot be interrupted is left behind. `launch` calls the communicator
under `_launching`, one call at a time. What may be called when is decided by `phases.Lifecycle`; what it returns is
performed here: the communicator's abort on a thread of its own, the deadline of that abort on another, and the end of
this process where the deadline passes. `watch` looks after it while collectives are in flight.

Invariants: `error` is set before the communicator's abort begins, and stays; no call of the communicator's but `query`
is made without `Lifecycle`'s leave. The communicator is released by its abort and by dropping it, which only the reaper
does, after the abort has returned; one whose abort is stuck is never dropped.

Threads: `form`, `abort`, `first_error` from any; launches from any, one after the other. `_lock` guards the life cycle
and the works, and is never held across a call of the communicator's. `try_destroy` on the reaper's thread only.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.errors import CollectiveError, ConfigError, FaultToleranceError
from ft_core.process_group import reaper as reaping
from ft_core.process_group.device import watch as watching
from ft_core.process_group.device.communicator import NothingQueuedError
from ft_core.process_group.device.host import ABORT, Host, process_host
from ft_core.process_group.device.meeting import Meeting
from ft_core.process_group.device.phases import Action, CallAbort, EndProcess, Lifecycle, Phase, WatchDeadline
from ft_core.process_group.device.work import DeviceWork
from ft_core.process_group.messages import first_line, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.process_group.device.communicator import Communicator
    from ft_core.process_group.spec import Spec

STUCK_S = 0.5
"""How long a forming thread may take to notice that it should end, before it counts as stuck in a call."""
MAX_FORMING = 64
"""How many inits may be running, abandoned ones included, before forming another is refused."""
MAX_IN_FLIGHT = 8192
"""Collectives of one group that have not ended; each keeps its tensors."""
EXIT_WAIT_S = 10.0
"""How long the end of the interpreter waits for what ends. torch's watchdog writes down where a failed collective was
launched, for which it needs the interpreter and gives itself 8 s: the process crashes where that is gone by then."""
POLL_S = 0.002
MISTAKES = (ConfigError, ValueError, TypeError, NotImplementedError)
"""What a communicator raises for arguments that it refused before it began: the group is as good as before."""

_live: set[Incarnation] = set()
_forming = threading.BoundedSemaphore(MAX_FORMING)
_exiting = False


class Incarnation:
    """One group over `communicator`; the file's header has the whole.

    `abort_s`: how long its abort may take, after which the process ends. `before`: the group that it replaces.
    """

    def __init__(
        self,
        spec: Spec,
        communicator: Communicator,
        *,
        abort_s: float,
        before: Incarnation | None = None,
        host: Host = process_host,
    ) -> None:
        self.spec = spec
        self.timeout_s = spec.timeout_s
        self._communicator: Communicator | None = communicator
        self._host = host
        self._before = before
        self._life = Lifecycle(abort_s)
        self._lock = threading.Lock()
        self._launching = threading.Lock()
        self._works: deque[tuple[DeviceWork, str, float]] = deque()
        """In flight, in the order of their launch: each with its name and when it has to be done."""
        self._meeting = Meeting(spec.store_addr, spec.replica_id, spec.rank, spec.world_size)
        self._deadline = host.now() + spec.timeout_s
        self._settled = threading.Event()  # formed, failed or aborted: wakes form()
        self._ended = threading.Event()  # the communicator's abort has returned
        self._given_up_at: float | None = None
        self._untracked = False  # a launch failed, and nobody knows what it had queued
        self._take_deadline_back: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"Incarnation({self.spec.what}, {self.spec.place}, {self.phase.value})"

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self._life.phase

    @property
    def error(self) -> Exception | None:
        """The first error that is known."""
        return self._life.error

    @property
    def is_forming(self) -> bool:
        """Whether it is neither formed nor over."""
        return self.phase is Phase.FORMING

    @property
    def is_aborted(self) -> bool:
        """Whether its end was wanted: nothing is launched on it any more."""
        return self.phase in (Phase.ABORTING, Phase.ABORTED, Phase.STUCK)

    # ---------------------------------------------------------------------------------------------------------- forming

    def form(self) -> None:
        """Form the group; raises ConfigError or PeerError, also if `abort` comes first. Bounded by the timeout."""
        reaping.device.start()
        _live.add(self)
        if _exiting:
            self.abort(CollectiveError("the process is exiting"))
        room = not self.is_aborted and _forming.acquire(blocking=False)
        if not room:  # or an abort came before its thread was there
            self.abort(CollectiveError(f"{MAX_FORMING} groups are forming or stuck in forming; not starting another"))
            self._perform_leave()
            raise self._refusal()
        self._host.start("ft-device-form", self._form_on_thread)
        # The thread itself gives up at the deadline; this is for one that is stuck in a call.
        if not self._settled.wait(self.spec.timeout_s + STUCK_S):
            waiting_for = self._meeting.waiting_for()
            self.abort(CollectiveError(f"{self.spec} did not form within {self.spec.timeout_s:.1f} s: {waiting_for}"))
        if self.phase is Phase.FAILED:
            assert self.error is not None
            self.abort(self.error)
        if self.is_aborted:
            raise self._refusal()

    def _form_on_thread(self) -> None:
        problem: Exception | None = None
        try:
            self._checkpoint()
            if self._before is not None:
                self._before.wait_ended(self._checkpoint, kernels=self.spec.world_size == 1)
                self._before = self._before.unended()
            self._init()
        except Exception as error:  # noqa: BLE001 - form() raises it, or nobody waits any more
            problem = error
        self._meeting.close(problem)
        with self._lock:
            if problem is None:
                actions = self._life.formed(self._host.now())
            else:
                self._life.failed(
                    problem if isinstance(problem, FaultToleranceError) else wrap(f"{self.spec} did not form", problem)
                )
                actions = self._life.leave(self._host.now())
            ready = self._life.phase is Phase.READY
        _forming.release()
        if ready:
            watching.watch.add(self)
            if self.is_aborted:  # meanwhile: that has removed it already
                watching.watch.remove(self)
        self._settled.set()
        self._perform(actions)

    def _init(self) -> None:
        communicator, spec = self._communicator, self.spec
        assert communicator is not None
        store = self._meeting.open(communicator.kind, self._deadline - self._host.now(), self._checkpoint)
        communicator.init(store, spec.rank, spec.world_size, self._checkpoint)

    def _checkpoint(self) -> None:
        if self.is_aborted:
            raise self._refusal()
        if self._host.now() > self._deadline:
            raise CollectiveError(f"{self.spec} did not form in time: {self._meeting.waiting_for()}")

    def _perform_leave(self) -> None:
        """Its init is never going to be called."""
        with self._lock:
            actions = self._life.leave(self._host.now())
        self._perform(actions)

    # ---------------------------------------------------------------------------------------------------------- running

    def launch(self, name: str, arguments: tuple[Any, ...]) -> DeviceWork:
        """Launch a collective; CollectiveError if the group has ended or fails, a mistake of the caller's as it is."""
        with self._launching:
            with self._lock:
                entered = len(self._works) < MAX_IN_FLIGHT and self._life.enter()
            if not entered:
                if self.phase is Phase.READY:
                    raise CollectiveError(f"{MAX_IN_FLIGHT} collectives of {self.spec} have not ended: wait for some")
                raise self._refusal()
            communicator = self._communicator
            assert communicator is not None
            problem: Exception | None = None
            work: DeviceWork | None = None
            try:
                launched = communicator.launch(name, *arguments)
                work = DeviceWork(name, launched, self, blocks=name == "barrier")
            except Exception as error:  # noqa: BLE001 - raised below, once the way out is open
                problem = error
            finally:
                with self._lock:
                    if work is not None:
                        self._works.append((work, name, self._host.now() + self.timeout_s))
                    elif not isinstance(problem, (*MISTAKES, NothingQueuedError)):
                        self._untracked = True
                    actions = self._life.leave(self._host.now())
                self._perform(actions)
        if work is not None:
            watching.watch.wake()
            return work
        assert problem is not None
        if self.is_aborted:
            raise self._refusal() from problem
        if isinstance(problem, MISTAKES):
            raise problem
        raise self.failed(name, problem) from problem

    def failed(self, name: str, cause: Exception) -> CollectiveError:
        """Latch a failure of the collective `name` and end the group; returns what to raise."""
        error = wrap(f"{name} on {self.spec} failed", cause)
        with self._lock:
            first = self._life.failed(error)
        if first:
            self.abort(error)
        return error

    def first_error(self) -> Exception | None:
        """Return the first error so far, one that nobody waited for too; never blocks."""
        communicator = self._communicator
        if self.error is None and communicator is not None and self.phase is Phase.READY:
            found = communicator.query()
            if found is not None:
                self.failed("a collective", RuntimeError(found))
        return self.error

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives launched from now on may take."""
        self.timeout_s = timeout.total_seconds()

    def refusal(self, error: Exception) -> Exception:
        """Return what to raise where a call meets `error`."""
        if isinstance(error, FaultToleranceError):
            return error
        return CollectiveError(f"{self.spec} has failed: {first_line(error)}")

    def _refusal(self) -> Exception:
        assert self.error is not None
        return self.refusal(self.error)

    def look(self) -> bool:
        """Find what has ended, failed, or takes too long (for the watch). Returns whether works are in flight."""
        late = ""
        while True:
            with self._lock:
                head = self._works[0] if self._works else None
            if head is None:
                break
            work, name, deadline = head
            if not work.is_completed():
                late = name if self._host.now() > deadline else ""
                break
            with self._lock:
                if self._works and self._works[0] is head:
                    self._works.popleft()
        if late:
            timeout_s = self.timeout_s
            self.failed(late, TimeoutError(f"timed out: it was not done within {timeout_s:.3f} s"))
        self.first_error()
        return bool(self._works) and not self.is_aborted

    @property
    def in_flight(self) -> int:
        """How many works have not ended."""
        with self._lock:
            works = list(self._works)
        return sum(work.is_running for work, _, _ in works)

    # ----------------------------------------------------------------------------------------------------------- ending

    def abort(self, reason: Exception) -> None:
        """End it: returns at once; pending works end, `form` raises. Idempotent, and the first reason stays."""
        with self._lock:
            actions = self._life.abort(reason, self._host.now())
        self._given_up_at = self._given_up_at or self._host.now()
        watching.watch.remove(self)
        self._settled.set()
        self._perform(actions)

    def wait_ended(self, checkpoint: Callable[[], None], *, kernels: bool = False) -> None:
        """Wait until the communicator's abort has returned, if it is under way, and those of the groups before.

        Two groups on one device: an abort frees memory, for which the driver waits for all kernels of the device and
        keeps a lock that other threads' launches need. A collective of the next group, which waits for its peers,
        would hold up this abort, and with it every launch here.

        `kernels`: only until nothing of it runs on the device any more, so that no tensor is written to. Enough for a
        group of one rank, which waits for nobody: its kernels end by themselves.
        """
        # Whoever replaced it does so too, but two calls of configure() at once may come here in either order.
        self.abort(CollectiveError(f"{self.spec} has ended: another group takes its place"))
        before = self._before
        if before is not None:  # given up itself while it waited, or of one rank
            before.wait_ended(checkpoint, kernels=kernels)
        while self._life.ending and not (kernels and self._is_quiet) and not self._ended.wait(POLL_S):
            checkpoint()

    @property
    def _is_quiet(self) -> bool:
        """Nothing can be launched any more, and what was has ended on the device."""
        return self._life.abort_called and not self._untracked and not self.in_flight

    def unended(self) -> Incarnation | None:
        """This one, or else the next before it, if an abort of its communicator's has yet to return.

        One that is stuck in its init as well: nobody waits for it, but its abort begins when that returns.
        """
        if not self._life.over:
            return self
        before = self._before
        return None if before is None else before.unended()

    def _perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, WatchDeadline):
                self._take_deadline_back = self._host.after(action.at - self._host.now(), self._tick)
                if self._ended.is_set():  # another thread's abort of the communicator was faster
                    self._take_deadline_back()
            elif isinstance(action, CallAbort):
                self._host.start(ABORT, self._abort_communicator)
            else:
                assert isinstance(action, EndProcess)
                self._host.end_process(f"{self.spec}: {action.reason}")

    def _tick(self) -> None:
        with self._lock:
            actions = self._life.tick(self._host.now())
        self._perform(actions)

    def _abort_communicator(self) -> None:
        communicator = self._communicator
        assert communicator is not None
        problem: Exception | None = None
        try:
            communicator.abort()
        except Exception as error:  # noqa: BLE001 - it decides whether this process can go on
            problem = error
        del communicator  # only the reaper drops it, and the end of the process waits for that one alone
        runs = problem is not None and self.in_flight > 0
        with self._lock:
            actions = self._life.abort_ended(problem, runs=runs)
        self._meeting.left()
        self._ended.set()
        self._take_deadline_back()
        self._perform(actions)

    def try_destroy(self) -> bool:
        """Release it once its abort has returned (the reaper calls this until it is True)."""
        self.abort(CollectiveError(f"{self.spec} was dropped"))
        if self.phase is not Phase.ABORTED:
            given_up_at = self._given_up_at
            assert given_up_at is not None
            if not self._life.abort_called and self._host.now() - given_up_at > STUCK_S:
                self._meeting.cut()  # it is stuck in a question to a store that does not answer
            return False
        with self._lock:
            self._works.clear()
        self._communicator = None
        self._before = None if self._before is None else self._before.unended()
        _live.discard(self)
        return True

    def become_child(self) -> None:
        """In a forked child, or an interpreter that ends: never used, aborted or released."""
        self._lock = threading.Lock()
        self._launching = threading.Lock()
        for held in (self._communicator, self._works):
            if held is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        self._communicator = None
        self._life.phase = Phase.STUCK
        self._life.error = CollectiveError(f"{self.spec} belongs to the process that this one was forked from")


def _after_fork_in_child() -> None:
    global _forming
    _forming = threading.BoundedSemaphore(MAX_FORMING)
    for incarnation in list(_live):
        incarnation.become_child()
    _live.clear()


def _threads_start() -> bool:
    """Python 3.12 and newer start no thread any more when exit functions run."""
    try:
        threading.Thread(target=int, daemon=True).start()
    except RuntimeError:
        return False
    return True


def _end_all_at_exit() -> None:
    """Abort what is left before the interpreter takes objects apart: a destructor would do it, and may not return."""
    global _exiting
    _exiting = True
    deadline = time.monotonic() + EXIT_WAIT_S
    left = list(_live)
    for incarnation in left:
        incarnation.abort(CollectiveError("the process is exiting"))
    reaping.device.stop(EXIT_WAIT_S)
    while left and time.monotonic() < deadline:
        left = [incarnation for incarnation in left if incarnation in _live and not incarnation.try_destroy()]
        if left and not _threads_start():
            break  # nobody aborts them: they are left, and the kernel closes their connections
        if left:
            time.sleep(0.002)
    for incarnation in left:
        incarnation.become_child()


atexit.register(_end_all_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
