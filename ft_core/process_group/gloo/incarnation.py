"""`Incarnation`: one Gloo group, from its forming to its destruction; `ProcessGroupGloo` has one at a time.

How it works: `form` runs Gloo's constructor on a thread of its own and waits for it or for `abort`, whichever is
first. Every incarnation has a Gloo device, and so a listening port, of its own; connections.py knows which sockets are
this group's. `abort` shuts them down: Gloo fails every pending work here, and on the peers, within milliseconds (its
own abort does not). A forked child drops the same. Ranks of one group in one process (tests) end each other's.

Invariants: `backend` is what collectives may be launched on: set once, when formed; None before, after an abort, and
in a forked child. `_held` keeps the backend referenced until all works have ended, and only the reaper drops it.
`error` is the first error, and stays. An aborted incarnation never becomes usable, however late its constructor
returns.

Threads: `form` and `abort` from any; `_form_on_thread` on "ft-gloo-form"; `try_destroy` on the reaper's only.
`_lock` guards the transitions and is never held across a call that can block.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Work
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo
from torch.distributed import DistError

from ft_core.errors import CollectiveError, ConfigError, FaultToleranceError
from ft_core.process_group import reaper as reaping
from ft_core.process_group import rendezvous, store_pool
from ft_core.process_group.fork_safety import close_in_child
from ft_core.process_group.gloo import connections, last_threads
from ft_core.process_group.gloo.connections import GroupConnections
from ft_core.process_group.gloo.work import GRACE_S, Outcome
from ft_core.process_group.messages import first_line, wrap
from ft_core.process_group.rendezvous import RendezvousStore
from ft_core.process_group.store_pool import StoreClient, parse_store_addr

if TYPE_CHECKING:
    from ft_core.process_group.spec import Spec

MAX_CONNECT_S = 5.0
"""How long connecting to ranks that are all there (their records are in the store) may take.

An abort in these milliseconds leaves the constructor's thread behind for as long: it may be waiting for a connection,
and nothing ends that."""
WAITS_FOR_A_CONNECTION = 5
"""Gloo waits this many times the timeout it is given for each connection while a group forms (`Pair::waitUntil`)."""
STUCK_S = 0.5
"""How long a forming thread may take to notice that it should end, before it counts as stuck in a call."""
MAX_FORMING = 64
"""How many constructors may be running, abandoned ones included, before forming another is refused."""
PRUNE_OUTCOMES_ABOVE = 64
MAX_TRACKED_WORKS = 4096
EXIT_WAIT_S = 2.0

_live: set[Incarnation] = set()
_forming = threading.BoundedSemaphore(MAX_FORMING)
_exiting = False
"""No group is formed any more: a thread in Gloo that wants the GIL of an ended interpreter aborts the process."""


class Incarnation:
    """One formed Gloo group, until it is destroyed; the file's header has the whole."""

    def __init__(self, spec: Spec, hostname: str | None = None, interface: str | None = None) -> None:
        self.spec = spec
        self._hostname = hostname
        self._interface = interface
        self.backend: TorchGloo | None = None
        self.error: Exception | None = None
        self.aborted = False
        self._has_failed = False
        self._held: TorchGloo | None = None
        self._dispatcher: dist.ProcessGroup | None = None
        self.connections = GroupConnections(spec.store_addr, spec.world_size)
        self._client: StoreClient | None = None
        self._deadline = time.monotonic() + spec.timeout_s
        self._aborted_at = math.inf
        self._works: deque[Work] = deque(maxlen=MAX_TRACKED_WORKS)
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._settled = threading.Event()  # formed, failed or aborted: wakes form()
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def __repr__(self) -> str:
        state = "aborted" if self.aborted else "formed" if self.backend is not None else "forming"
        return f"Incarnation({self.spec.place}, {state}, at {self.connections.listening})"

    @property
    def is_forming(self) -> bool:
        """Whether it is neither formed nor over."""
        return self.backend is None and not self.aborted

    # ---------------------------------------------------------------------------------------------------------- forming

    def form(self) -> None:
        """Form the group; raises ConfigError or PeerError, also if `abort` comes first. Bounded by the timeout."""
        reaping.gloo.start()
        if not _forming.acquire(blocking=False):
            raise CollectiveError(f"{MAX_FORMING} groups are still forming or stuck in forming; not starting another")
        thread = threading.Thread(target=self._form_on_thread, name="ft-gloo-form", daemon=True)
        _live.add(self)
        with self._lock:  # either it starts, or an abort came first: an exiting interpreter ends all that it finds
            if not (self.aborted or _exiting):
                thread.start()
                self._thread = thread
        if self._thread is None:
            _forming.release()
            _live.discard(self)
            self.abort(CollectiveError("the process is exiting"))
            raise self.refusal()
        timeout_s = self.spec.timeout_s
        # The thread itself gives up at the deadline; this is for one that is stuck in a call.
        if not self._settled.wait(timeout_s + STUCK_S):
            self.abort(
                CollectiveError(f"{self.spec} did not form within {timeout_s:.1f} s: {self.connections.waiting_for()}")
            )
        if self._problem is not None and not self.aborted:
            problem = self._problem
            wrapped = (
                problem if isinstance(problem, FaultToleranceError) else wrap(f"{self.spec} did not form", problem)
            )
            self.abort(wrapped)
        if self.aborted:
            raise self.refusal()

    def _form_on_thread(self) -> None:
        try:
            self._construct()
        except Exception as error:  # noqa: BLE001 - form() raises it, or nobody waits any more
            self._problem = error
        finally:
            _forming.release()
            self._settled.set()
            if self.aborted:
                self.connections.end()

    def _construct(self) -> None:
        spec = self.spec
        client, prefix = None, ""
        if spec.world_size > 1:
            address, prefix = parse_store_addr(spec.store_addr)
            client = store_pool.pool.take(address, self._deadline - time.monotonic())
        with self._lock:
            self._client = client
        try:
            backend = self._connect(client, prefix)
        except Exception as error:
            self._let_go(client, good=not isinstance(error, DistError))
            raise
        self._let_go(client, good=True, formed=True)
        self._held = backend
        self.connections.settle()
        _set_timeout(backend, spec.timeout)
        with self._lock:
            if not self.aborted:
                self.backend = backend

    def _connect(self, client: StoreClient | None, prefix: str) -> TorchGloo:
        spec = self.spec
        self._checkpoint()
        meeting = None if client is None else client.store
        exchange = RendezvousStore(meeting, prefix, spec.replica_id, spec.world_size, self._checkpoint)
        self.connections.rendezvous = exchange
        options = TorchGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
        options._devices = [self._create_device(client)]
        options._timeout = min(spec.timeout, timedelta(seconds=MAX_CONNECT_S)) / WAITS_FOR_A_CONNECTION
        try:
            return TorchGloo(exchange, spec.rank, spec.world_size, options)
        finally:
            del options  # an error's traceback must not keep the device and its port alive

    def _let_go(self, client: StoreClient | None, good: bool, *, formed: bool = False) -> None:
        """Stop using the store client: what it was last asked has been answered, unless the store itself failed."""
        exchange = self.connections.rendezvous
        if client is not None and good:
            try:
                if formed and exchange is not None and not self.aborted:
                    exchange.done(client.store)
                rendezvous.left_records.delete(client.address, client.store)
            except RuntimeError:  # the store has just died, and the records with it
                good = False
        with self._lock:
            self._client = None
        if client is not None and good:
            store_pool.pool.give_back(client)

    def _checkpoint(self) -> None:
        if self.aborted:
            raise self.refusal()
        if time.monotonic() > self._deadline:
            raise CollectiveError(f"{self.spec} did not form in time: {self.connections.waiting_for()}")

    def _create_device(self, client: StoreClient | None) -> Any:
        spec = self.spec
        if self._interface:
            return _device("interface", self._interface)
        if self._hostname:
            return _device("hostname", self._hostname)
        if spec.world_size == 1:
            return _device("hostname", "127.0.0.1")
        if client is not None and client.local_host is not None:
            # The address that the way to the store goes out from: no name look-up, and the interface that is connected.
            return _device("hostname", client.local_host)
        return TorchGloo.create_default_device()

    # ---------------------------------------------------------------------------------------------------------- running

    def track(self, work: Work) -> None:
        """Remember a work until it has ended: its buffers are in use, and its failure may be asked for."""
        works = self._works
        works.append(work)
        self.forget_ended()

    def forget_ended(self) -> None:
        """Drop works that ended from the head, and note the failure of one that nobody waited for."""
        works = self._works
        while works:
            try:
                work = works.popleft()
            except IndexError:  # another thread took it
                return
            if not work.is_completed():
                works.appendleft(work)
                return
            try:
                work.wait()  # returns at once; the only way to ask c10d for the outcome without a deprecation warning
            except RuntimeError as cause:
                self.failed("a collective", cause)

    def failed(self, name: str, cause: Exception, ended: bool = True) -> CollectiveError:
        """Return what to raise for a failure of the collective `name`, and record it if the collective has `ended`.

        A collective that failed here leaves the group unusable, but a peer may be waiting for a rank that still
        waits: on a ring the failure stops at the first rank that has nothing to do with the dead one. So the first
        failure ends this group's connections, and reaches everybody within milliseconds.
        """
        error = wrap(f"{name} on {self.spec} failed", cause)
        if not ended:
            return error
        with self._lock:
            first = not self._has_failed and not self.aborted
            self._has_failed = True
            if self.error is None:
                self.error = error
        if first:
            self.connections.end()
        return error

    def is_doomed(self) -> bool:
        """Whether what runs on it cannot end well any more: aborted, failed, or a connection of it is gone.

        Called between the slices of a wait. Where the connections are not known they cannot be ended either, so what
        runs on them must be waited for.
        """
        if not self.connections.known:
            return False
        return self.aborted or self._has_failed or self.connections.any_lost()

    def watch(self, outcome: Outcome) -> None:
        """Have the future failed after an abort, should Gloo not do it."""
        with self._lock:
            if len(self._outcomes) >= PRUNE_OUTCOMES_ABOVE:
                self._outcomes = [other for other in self._outcomes if not other.is_done]
            self._outcomes.append(outcome)
            aborted = self.aborted and bool(self.connections.known)
        if aborted:
            reaping.gloo.retire(_Settling(self))

    def outcomes_left(self) -> list[Outcome]:
        """Return the futures that are not completed."""
        with self._lock:
            self._outcomes = [outcome for outcome in self._outcomes if not outcome.is_done]
            return list(self._outcomes)

    def first_error(self) -> Exception | None:
        """Return the first error so far, of works nobody waited for too."""
        if self.error is None:
            for work in list(self._works):
                if work.is_completed():
                    try:
                        work.wait()
                    except RuntimeError as cause:
                        self.failed("a collective", cause)
                        break
        return self.error

    def refusal(self) -> Exception:
        """Return what a call on an incarnation that cannot be used raises."""
        if isinstance(self.error, FaultToleranceError):
            return self.error
        return CollectiveError(f"{self.spec} was aborted: {self.error or 'configure() it again'}")

    def dispatcher(self) -> dist.ProcessGroup:
        """Return torch's own C++ group over this backend, for the operations that a bare backend lacks in Python."""
        with self._lock:
            if self._dispatcher is None:
                spec = self.spec
                group = dist.ProcessGroup(PrefixStore("", HashStore()), spec.rank, spec.world_size)
                devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
                for device in devices:
                    group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._held)
                self._dispatcher = group
            return self._dispatcher

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of collectives launched from now on."""
        backend = self.backend
        if backend is not None:
            _set_timeout(backend, timeout)

    @property
    def in_flight(self) -> int:
        """How many works have not ended."""
        return sum(1 for work in list(self._works) if not work.is_completed())

    # ----------------------------------------------------------------------------------------------------------- ending

    def abort(self, reason: Exception) -> None:
        """End it: pending works fail here and on the peers, `form` raises; idempotent, and the first reason stays."""
        with self._lock:
            if self.aborted:
                return
            self.aborted = True
            self.backend = None
            if self.error is None:
                self.error = reason
            self._aborted_at = time.monotonic()
            has_futures = bool(self._outcomes and self.connections.known)
        self.connections.end()
        spec = self.spec
        if spec.rank == 0 and spec.world_size > 1 and self.connections.rendezvous is not None:
            rendezvous.left_records.add(*parse_store_addr(spec.store_addr))
        if has_futures:
            reaping.gloo.retire(_Settling(self))
        self._settled.set()

    def try_destroy(self) -> bool:
        """Destroy it unless something still runs on it (the reaper calls this until it is True)."""
        self.abort(CollectiveError(f"{self.spec} was dropped"))
        if self._thread is not None and self._thread.is_alive():
            self.connections.end()  # those that its constructor made meanwhile
            with self._lock:
                if self._client is not None and time.monotonic() - self._aborted_at > STUCK_S:
                    self._client.cut()  # it is stuck in a question to a store that does not answer
            return False
        if any(not work.is_completed() for work in self._works):
            self.connections.end()
            return False
        self._dispatcher = None  # holds the backend too
        # Our attribute and the call's argument make two: more means that a thread is just launching something on it.
        if self._held is not None and sys.getrefcount(self._held) > 2:
            return False
        self._works.clear()
        self._held = None
        self.connections.forget()
        _live.discard(self)
        return True

    def _become_child(self) -> None:
        """In a forked child: never usable, never destroyed (its threads are not here to be joined)."""
        self._lock = threading.Lock()
        for held in (self._held, self._dispatcher, self.connections.rendezvous, self._works):
            if held is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        self.aborted = True
        self.backend = None
        self.error = CollectiveError(f"{self.spec} belongs to the process that this one was forked from")


class _Settling:
    """Given to the reaper after an abort: fails the futures that Gloo leaves open."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._fail_at = time.monotonic() + GRACE_S

    def try_destroy(self) -> bool:
        left = self._incarnation.outcomes_left()
        if not left:
            return True
        if time.monotonic() < self._fail_at:
            return False
        for outcome in left:
            outcome.lose()
        return True


def _device(kind: str, value: str) -> Any:
    try:
        return TorchGloo.create_device(**{kind: value})
    except RuntimeError as error:
        raise ConfigError(f"{kind}={value!r}: Gloo cannot listen there: {first_line(error)}") from error


def _set_timeout(backend: Any, timeout: timedelta) -> None:
    """torch 2.8 has it under its private name only."""
    (getattr(backend, "set_timeout", None) or backend._set_default_timeout)(timeout)


def _fds_of_all() -> list[int]:
    return [fd for incarnation in list(_live) for fd in incarnation.connections.fds()]


def _after_fork_in_child() -> None:
    global _forming
    _forming = threading.BoundedSemaphore(MAX_FORMING)
    for incarnation in list(_live):
        incarnation._become_child()
    _live.clear()
    connections.clear_in_child()


def _end_all_at_exit() -> None:
    """End what is left before the interpreter tears objects down: Gloo's destructor would wait for works in flight."""
    global _exiting
    _exiting = True
    deadline = time.monotonic() + EXIT_WAIT_S
    left = list(_live)
    for incarnation in left:
        incarnation.abort(CollectiveError("the process is exiting"))
    reaping.gloo.stop(EXIT_WAIT_S)
    while (left or last_threads.any_inside()) and time.monotonic() < deadline:
        left = [incarnation for incarnation in left if incarnation in _live and not incarnation.try_destroy()]
        time.sleep(0.002)
    for incarnation in left:
        incarnation._become_child()
    if left or last_threads.any_inside():
        last_threads.outlast()


close_in_child(_fds_of_all)
atexit.register(_end_all_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
