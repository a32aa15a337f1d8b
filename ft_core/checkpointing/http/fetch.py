"""One fetch or prefetch: workers that share out the ranges of a state among donors.

A worker per connection pulls items from a shared queue; an item is a range to receive, or a batch of checksums to
compare (when a prefetch left something to compare with; the ranges that differ then join the queue). Every donor works
at its own pace, so a slow one simply does less. When a connection fails, its items go back to the front of the queue; a
donor that keeps failing is given up; only when none is left has it failed.

Invariants
- A range is owned by one worker from taking to finishing, so memory has one writer.
- Nothing counts as received unless its trailer shows that the donor's offer was open when its last byte was read, and
  its checksum matches what lies in memory here (live: only the former).
- When `run` returns or raises, no thread will write into the caller's tensors any more.

Threads: the caller waits on `changed`; workers `ft-heal-fetch-<i>` are daemons that end with `run`. The caller ends
them by cutting their connections.
"""

from __future__ import annotations

import logging
import random
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from ft_core.checkpointing.http.connection import Busy, ClientTls, DonorConnection, Refused, Untrusted, explain
from ft_core.checkpointing.http.wire import UNSENDABLE
from ft_core.checkpointing.own_state import limit_for
from ft_core.checkpointing.ranges import parse_manifest
from ft_core.checkpointing.receive_plan import ReceivePlan
from ft_core.checkpointing.tensor_bytes import checksum
from ft_core.errors import ConfigError, HealError, StateRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.certificates import Tls
    from ft_core.checkpointing.receive_plan import Given

logger = logging.getLogger(__name__)

CONNECT_S_MAX: Final = 5.0
PIPELINE: Final = 2
"""Requests in flight per connection: hides one round trip without hoarding work."""
CONNECTIONS_WITH_ONE_DONOR: Final = 2
"""One stream does not fill the wire: sender and receiver would take turns."""
FAILURES_MAX: Final = 2
"""Failures of a connection in a row, without progress between them, before the donor is given up."""
FAILURES_TOTAL_MAX: Final = 8
"""Failures of a connection altogether: a donor may not send one good range between bad ones for ever."""
SUM_BATCHES_PER_DONOR: Final = 4
CANCEL_POLL_S: Final = 0.02
JOIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Item:
    """Work: receive range `first`, or (count > 0) compare the checksums of `count` ranges from `first` on."""

    first: int
    count: int = 0

    def target(self, tag: str) -> str:
        if self.count:
            return f"/state/{quote(tag, safe='')}/sums?first={self.first}&count={self.count}"
        return f"/state/{quote(tag, safe='')}/range/{self.first}"


@dataclass(slots=True)
class _Donor:
    """What is known about one donor; guarded by the fetch's lock."""

    address: str
    relay: bool = False
    """A replica that heals itself, and passes on what it received; nobody counts on it before it has."""
    workers: int = 0
    offers: bool = False
    """It has sent the manifest."""
    used: bool = False
    refused: bool = False
    """It answered that its state cannot be sent."""
    failures: list[str] = field(default_factory=list)  # at most FAILURES_MAX * connections

    def story(self) -> str:
        return f"{self.address}: {'; then '.join(dict.fromkeys(self.failures)) or 'no answer yet'}"


class Fetch:
    """One fetch or prefetch. Everything below `changed` is guarded by it, except `plan`, which is set once."""

    def __init__(
        self,
        donors: Sequence[str],
        what: str,
        token: str | None,
        deadline_s: float,
        idle_s: float,
        cancel: threading.Event | None,
        given: Given,
        *,
        live: bool = False,
        given_s: float | None = None,
        relays: Sequence[str] = (),
        tls: Tls | None = None,
    ) -> None:
        addresses = list(dict.fromkeys(donors))
        if not addresses:
            raise ConfigError("fetch needs at least one donor")
        if deadline_s <= 0 or idle_s <= 0:
            raise ConfigError(f"deadline_s and idle_s must be positive, got {deadline_s} and {idle_s}")
        self._tls = ClientTls.of(tls)
        self._what, self._token, self._idle_s, self._cancel = what, token, idle_s, cancel
        self._given, self._live = given, live
        self._limit = limit_for(given.own)
        self._began = time.monotonic()
        self._end = self._began + deadline_s
        self._given_by = self._end if given_s is None else min(self._end, self._began + given_s)
        """Until then the first donor has to offer something."""
        self._manifest_target = ""
        self.changed = threading.Condition()
        self.plan: ReceivePlan | None = None
        self.bytes = 0
        self._donors = [_Donor(address) for address in addresses]
        self._donors += [_Donor(address, relay=True) for address in dict.fromkeys(relays) if address not in addresses]
        self._queue: deque[_Item] = deque()
        self._outstanding = 0
        self._planning = False
        self._fatal: HealError | None = None
        self._stopped = False
        self._connections: set[DonorConnection] = set()
        for donor in self._donors:
            DonorConnection(donor.address, None)  # a bad address is the caller's mistake: say so before anything starts

    def elapsed_s(self) -> float:
        """Seconds since the fetch was made."""
        return time.monotonic() - self._began

    def donors_used(self) -> tuple[str, ...]:
        """Addresses of the donors that answered at least one item."""
        with self.changed:
            return tuple(donor.address for donor in self._donors if donor.used)

    # -- the caller's thread

    def run(self, manifest_target: str) -> ReceivePlan:
        """Do the work; returns the filled plan or raises."""
        self._manifest_target = manifest_target
        donors = [donor for donor in self._donors if not donor.relay]
        each = CONNECTIONS_WITH_ONE_DONOR if len(donors) == 1 else 1
        threads: list[threading.Thread] = []
        for donor in [*donors * each, *(donor for donor in self._donors if donor.relay)]:
            donor.workers += 1
            name = f"ft-heal-fetch-{len(threads)}"
            threads.append(threading.Thread(target=self._work, args=(donor,), name=name, daemon=True))
        try:
            for thread in threads:
                thread.start()
            self._wait()
        finally:
            with self.changed:
                self._stopped = True
                connections = list(self._connections)
                self.changed.notify_all()
            for connection in connections:
                connection.cut()
            end = time.monotonic() + JOIN_S
            for thread in threads:
                # A worker still resolving a name may outlive this; it finds the fetch stopped and touches nothing.
                if thread.ident is not None:
                    thread.join(max(0.0, end - time.monotonic()))
        assert self.plan is not None
        return self.plan

    def _wait(self) -> None:
        with self.changed:
            while not self._done():
                if self._fatal is not None:
                    raise self._fatal
                if not any(donor.workers for donor in self._donors if donor.offers or not donor.relay):
                    refused = all(donor.refused for donor in self._donors if not donor.relay)
                    kind = StateRefusedError if refused else HealError
                    raise kind(self._failed("could not be received from any donor"))
                if self._cancel is not None and self._cancel.is_set():
                    raise HealError(self._failed("was not received: cancelled"))
                left = (self._given_by if self.plan is None else self._end) - time.monotonic()
                if left <= 0:
                    what = "offered by nobody" if self.plan is None and self._given_by < self._end else "not complete"
                    raise HealError(self._failed(f"was {what} after {self.elapsed_s():.1f} s"))
                self.changed.wait(left if self._cancel is None else min(left, CANCEL_POLL_S))

    def _done(self) -> bool:
        return self.plan is not None and not self._queue and not self._outstanding

    def _failed(self, text: str) -> str:
        stories = [donor.story() for donor in self._donors if donor.offers or not donor.relay]
        return f"{self._what} {text} ({self.bytes} bytes arrived): {' | '.join(stories)}"

    # -- workers

    def _work(self, donor: _Donor) -> None:
        failures = total = 0
        try:
            while failures < FAILURES_MAX and total < FAILURES_TOTAL_MAX and not self._stopped:
                connection = DonorConnection(donor.address, self._token, self._tls)
                with self.changed:
                    self._connections.add(connection)
                progress = [0]
                try:
                    self._converse(donor, connection, progress)
                    return
                except Busy as e:
                    self._pause(e.retry_s * random.uniform(0.5, 1.5))  # those who were sent away come back apart
                except Exception as e:
                    failures = 1 if progress[0] else failures + 1
                    total += 1
                    with self.changed:
                        donor.refused |= isinstance(e, Untrusted) or (isinstance(e, Refused) and e.status == UNSENDABLE)
                        if not self._stopped:
                            donor.failures.append(explain(e))
                            del donor.failures[: -2 * FAILURES_MAX]
                    if isinstance(e, Refused | Untrusted):
                        return
                    if not isinstance(e, (OSError, HealError)):
                        logger.exception("healing from %s failed unexpectedly", donor.address)
                        return
                finally:
                    connection.close()
                    with self.changed:
                        self._connections.discard(connection)
        finally:
            with self.changed:
                donor.workers -= 1
                self.changed.notify_all()

    def _converse(self, donor: _Donor, connection: DonorConnection, progress: list[int]) -> None:
        left = max(0.001, self._end - time.monotonic())
        connection.open(min(left, CONNECT_S_MAX), left)
        tag, plan = self._agree(donor, connection)
        connection.set_idle(min(self._idle_s, max(0.001, self._end - time.monotonic())))
        inflight: deque[_Item] = deque()
        try:
            while True:
                while len(inflight) < PIPELINE:
                    item = self._take(wait=not inflight)
                    if item is None:
                        break
                    inflight.append(item)
                    connection.request(item.target(tag))
                if not inflight:
                    return
                more = self._receive(connection, plan, inflight[0])
                inflight.popleft()
                self._finish(donor, more)
                progress[0] += 1
        finally:
            with self.changed:
                self._queue.extendleft(inflight)
                self._outstanding -= len(inflight)
                self.changed.notify_all()

    def _pause(self, seconds: float) -> None:
        end = min(time.monotonic() + seconds, self._end)
        with self.changed:
            while not self._stopped and (left := end - time.monotonic()) > 0:
                self.changed.wait(left)

    def _agree(self, donor: _Donor, connection: DonorConnection) -> tuple[str, ReceivePlan]:
        """Get the donor's manifest; the first to arrive becomes the plan, all others must be cut alike."""
        wait_ms = max(1, int((self._end - time.monotonic()) * 1000) - 50)
        connection.request(f"{self._manifest_target}?wait_ms={wait_ms}")
        body, headers = connection.small_body(self._limit.manifest_bytes)
        tag, digest = unquote(headers.get("x-ft-tag", "")), headers.get("x-ft-layout", "")
        with self.changed:
            donor.offers = True
            while self._planning:
                self.changed.wait()
            plan = self.plan
            self._planning = plan is None
        if plan is None:
            try:
                manifest = parse_manifest(body, self._limit)
                plan = self._make_plan(manifest)
            finally:
                with self.changed:
                    self._planning = False
                    self.changed.notify_all()
        if digest != plan.manifest.digest:
            raise Refused(409, "its state has other tensors (key paths, dtypes or shapes) than the first donor's")
        return tag, plan

    def _make_plan(self, manifest: Any) -> ReceivePlan:
        if self._stopped:
            raise OSError("cancelled")
        try:
            plan = ReceivePlan(manifest, self._given)
        except HealError as e:
            with self.changed:
                self._fatal = e  # our own memory or `into`: no other donor can help
            raise
        compare = [i for i in plan.needed if plan.known[i] is not None]
        batch = max(1, -(-len(compare) // (SUM_BATCHES_PER_DONOR * len(self._donors))))
        items = [_Item(first, count) for first, count in _runs(compare, batch)]
        items += [_Item(i) for i in plan.needed if plan.known[i] is None]
        with self.changed:
            self._queue.extend(items)
            self.plan = plan
            self._given.gauge.total = plan.nbytes
        return plan

    def _take(self, *, wait: bool) -> _Item | None:
        """The next item; None if there is none now or, with `wait`, if all work is done."""
        with self.changed:
            while not self._queue and wait and self._outstanding and not self._stopped:
                self.changed.wait()
            if self._stopped or not self._queue:
                return None
            self._outstanding += 1
            return self._queue.popleft()

    def _receive(self, connection: DonorConnection, plan: ReceivePlan, item: _Item) -> list[_Item]:
        """Read the answer to `item`; returns the work that follows from it."""
        length, _ = connection.head()
        if item.count:
            body = bytearray(8 * item.count)
            if length != len(body):
                raise HealError(f"{item.count} checksums came as {length} bytes")
            connection.receive(memoryview(body))
            if connection.trailer() != checksum(body):
                raise HealError("the checksum of an answer does not match")
            theirs = struct.unpack(f"<{item.count}Q", body)
            differ = [_Item(i) for i, value in enumerate(theirs, item.first) if plan.known[i] != value]
            with self.changed:
                compared = range(item.first, item.first + item.count)
                self._given.gauge.done += sum(len(plan.target(i)) for i in compared)
                self._given.gauge.done -= sum(len(plan.target(more.first)) for more in differ)
            return differ
        target = plan.target(item.first)
        if length != len(target):
            raise HealError(f"range {item.first} has {length} bytes instead of {len(target)}")
        with self.changed:
            if self._stopped:
                raise OSError("cancelled")
            plan.forget(item.first)
        connection.receive(target)
        value = checksum(target)
        if connection.trailer() != value and not self._live:
            raise HealError(f"the checksum of range {item.first} does not match")
        with self.changed:
            self.bytes += length
            self._given.gauge.done += length
            plan.arrived(item.first, value)
        return []

    def _finish(self, donor: _Donor, more: list[_Item]) -> None:
        with self.changed:
            donor.used = True
            self._queue.extend(more)
            self._outstanding -= 1
            if more or not self._outstanding:
                self.changed.notify_all()


def _runs(indices: list[int], longest: int) -> list[tuple[int, int]]:
    """Consecutive indices as (first, count), none longer than `longest`."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index and runs[-1][1] < longest:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
