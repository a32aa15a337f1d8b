"""One fetch or prefetch: workers that share out the ranges of a state among donors, over `DonorLink`s of any kind.

A worker per link pulls items from a shared queue; an item is a range to receive, or a batch of checksums to
compare (when a prefetch left something to compare with; the ranges that differ then join the queue). Every donor works
at its own pace, so a slow one simply does less. When a link fails, its items go back to the front of the queue; a
donor that keeps failing is given up; only when none is left has it failed.

Invariants
- A range is owned by one worker from taking to finishing, so memory has one writer.
- Nothing counts as received unless its trailer shows that the donor's offer was open when its last byte was read, and
  its checksum matches what lies in memory here (live: only the former).
- When `run` returns or raises, no thread will write into the caller's tensors any more.

Threads: the caller waits on `changed`; workers `ft-heal-fetch-<i>` are daemons that end with `run`. The caller ends
them by cutting their links.
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

from ft_core.checkpointing.donor_link import Busy, Item, Refused, Untrusted, explain
from ft_core.checkpointing.http.wire import UNSENDABLE
from ft_core.checkpointing.own_state import limit_for
from ft_core.checkpointing.ranges import parse_manifest
from ft_core.checkpointing.receive_plan import ReceivePlan
from ft_core.checkpointing.tensor_bytes import checksum
from ft_core.errors import ConfigError, HealError, StateRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.checkpointing.donor_link import DonorLink, Links
    from ft_core.checkpointing.receive_plan import Given

logger = logging.getLogger(__name__)

CONNECT_S_MAX: Final = 5.0
FAILURES_MAX: Final = 2
"""Failures of links to a donor in a row, without progress between them, before it is given up."""
FAILURES_TOTAL_MAX: Final = 8
"""Failures of links to a donor altogether: it may not send one good range between bad ones for ever."""
SUM_BATCHES_PER_DONOR: Final = 4
ANSWER_S: Final = 0.05
"""A donor is to answer so long before the end that its answer is still read."""
STAGING_S: Final = 5.0
"""Longest a worker that has nothing under way waits for pinned memory."""
CANCEL_POLL_S: Final = 0.02
JOIN_S: Final = 5.0


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


@dataclass(frozen=True, slots=True)
class FetchResult:
    """`state` is complete; `bytes` is what travelled, `total_bytes` the size of all tensors in it."""

    state: Any
    bytes: int
    total_bytes: int
    seconds: float
    donors_used: tuple[str, ...]


class Fetch:
    """One fetch or prefetch. Everything below `changed` is guarded by it, except `plan`, which is set once."""

    def __init__(
        self,
        donors: Sequence[str],
        what: str,
        links: Links,
        deadline_s: float,
        idle_s: float,
        cancel: threading.Event | None,
        given: Given,
        *,
        live: bool = False,
        given_s: float | None = None,
        relays: Sequence[str] = (),
    ) -> None:
        addresses = list(dict.fromkeys(donors))
        if not addresses:
            raise ConfigError("fetch needs at least one donor")
        if deadline_s <= 0 or idle_s <= 0:
            raise ConfigError(f"deadline_s and idle_s must be positive, got {deadline_s} and {idle_s}")
        self._what, self._links, self._idle_s, self._cancel = what, links, idle_s, cancel
        self._given, self._live = given, live
        self._limit = limit_for(given.own)
        self._began = time.monotonic()
        self._end = self._began + deadline_s
        self._given_by = self._end if given_s is None else min(self._end, self._began + given_s)
        """Until then the first donor has to offer something."""
        self.changed = threading.Condition()
        self.plan: ReceivePlan | None = None
        self.bytes = 0
        self._donors = [_Donor(address) for address in addresses]
        self._donors += [_Donor(address, relay=True) for address in dict.fromkeys(relays) if address not in addresses]
        self._queue: deque[Item] = deque()
        self._outstanding = 0
        self._planning = False
        self._fatal: HealError | None = None
        self._stopped = False
        self._open: set[DonorLink] = set()
        """Those that something is waited for on: cut at the end. The others have nothing under way, and leave."""
        for donor in self._donors:
            links.to(donor.address)  # a bad address is the caller's mistake: say so before anything starts

    def elapsed_s(self) -> float:
        """Seconds since the fetch was made."""
        return time.monotonic() - self._began

    def donors_used(self) -> tuple[str, ...]:
        """Addresses of the donors that answered at least one item."""
        with self.changed:
            return tuple(donor.address for donor in self._donors if donor.used)

    # -- the caller's thread

    def run(self) -> ReceivePlan:
        """Do the work; returns the filled plan or raises."""
        donors = [donor for donor in self._donors if not donor.relay]
        each = self._links.with_one_donor if len(donors) == 1 else 1
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
                links = list(self._open)
                self.changed.notify_all()
            for link in links:
                link.cut()
            end = time.monotonic() + JOIN_S
            for thread in threads:
                # A worker still resolving a name may outlive this; it finds the fetch stopped and touches nothing.
                if thread.ident is not None:
                    thread.join(max(0.0, end - time.monotonic()))
        assert self.plan is not None
        return self.plan

    def result(self, arrived: Callable[[ReceivePlan], None] | None = None) -> FetchResult:
        """Do the work and build the state. `arrived`: called with all that lies in memory, if nothing was left out."""
        try:
            plan = self.run()
        except HealError:
            if self.plan is not None:
                self.plan.settle()
            raise
        state = plan.finish()
        if arrived is not None and self._given.only is None:
            arrived(plan)
        return FetchResult(state, self.bytes, plan.nbytes, self.elapsed_s(), self.donors_used())

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
                link = self._links.to(donor.address)
                with self.changed:
                    self._open.add(link)
                progress = [0]
                try:
                    self._converse(donor, link, progress)
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
                    if isinstance(e, Refused | Untrusted) or not link.reopens:
                        return
                    if not isinstance(e, (OSError, HealError)):
                        logger.exception("healing from %s failed unexpectedly", donor.address)
                        return
                finally:
                    link.close()
                    with self.changed:
                        self._open.discard(link)
        finally:
            with self.changed:
                donor.workers -= 1
                self.changed.notify_all()

    def _converse(self, donor: _Donor, link: DonorLink, progress: list[int]) -> None:
        left = max(0.001, self._end - time.monotonic())
        link.open(min(left, CONNECT_S_MAX), left)
        plan = self._agree(donor, link)
        link.set_idle(min(self._idle_s, max(0.001, self._end - time.monotonic())))
        inflight: deque[Item] = deque()
        try:
            while True:
                while len(inflight) < link.window:
                    item = self._take(link, wait=not inflight)
                    if item is None:
                        break
                    target = self._target(plan, item, STAGING_S if not inflight else 0.0)
                    if target is None and not item.count:
                        self._put_back(item)
                        break
                    inflight.append(item)
                    link.ask(item, target)
                if not inflight:
                    return
                more = self._receive(link, plan, inflight[0])
                inflight.popleft()
                self._finish(donor, link, more, idle=not inflight)
                progress[0] += 1
        finally:
            if inflight:
                link.close()  # first: nobody else may be given memory that this link may still write to
            with self.changed:
                for item in inflight:
                    plan.abandon(item.first)
                self._queue.extendleft(inflight)
                self._outstanding -= len(inflight)
                self.changed.notify_all()

    def _put_back(self, item: Item) -> None:
        """There is no memory to receive it into while this link has others under way."""
        with self.changed:
            self._queue.appendleft(item)
            self._outstanding -= 1
            self.changed.notify_all()

    def _target(self, plan: ReceivePlan, item: Item, within_s: float) -> memoryview | None:
        """Where a range goes, which is overwritten from now on; None: pinned memory for it is not free in that time."""
        if item.count:
            return None
        landing = plan.landing(item.first, within_s)
        if landing is None and within_s:
            self._put_back(item)
            raise HealError(f"no pinned memory was free within {within_s:g} s (FT_STAGING_MB)")
        with self.changed:
            if landing is not None:
                if self._stopped:
                    plan.abandon(item.first)
                    raise OSError("cancelled")
                plan.forget(item.first)
        return landing

    def _pause(self, seconds: float) -> None:
        end = min(time.monotonic() + seconds, self._end)
        with self.changed:
            while not self._stopped and (left := end - time.monotonic()) > 0:
                self.changed.wait(left)

    def _agree(self, donor: _Donor, link: DonorLink) -> ReceivePlan:
        """Get the donor's manifest; the first to arrive becomes the plan, all others must be cut alike."""
        greeting = link.greet(max(0.001, self._end - time.monotonic() - ANSWER_S), self._limit.manifest_bytes)
        with self.changed:
            self._open.discard(link)
            donor.offers = True
            while self._planning:
                self.changed.wait()
            plan = self.plan
            self._planning = plan is None
        if plan is None:
            try:
                manifest = parse_manifest(greeting.manifest, self._limit)
                plan = self._make_plan(manifest)
            finally:
                with self.changed:
                    self._planning = False
                    self.changed.notify_all()
        if greeting.digest != plan.manifest.digest:
            raise Refused(409, "its state has other tensors (key paths, dtypes or shapes) than the first donor's")
        return plan

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
        items = [Item(first, count) for first, count in _runs(compare, batch)]
        items += [Item(i) for i in plan.needed if plan.known[i] is None]
        with self.changed:
            self._queue.extend(items)
            self.plan = plan
            self._given.gauge.total = plan.nbytes
        return plan

    def _take(self, link: DonorLink, *, wait: bool) -> Item | None:
        """The next item; None if there is none now or, with `wait` (nothing is under way), if all work is done."""
        with self.changed:
            while not self._queue and wait and self._outstanding and not self._stopped:
                self.changed.wait()
            if self._stopped or not self._queue:
                return None
            self._open.add(link)
            self._outstanding += 1
            return self._queue.popleft()

    def _receive(self, link: DonorLink, plan: ReceivePlan, item: Item) -> list[Item]:
        """Read the answer to `item`; returns the work that follows from it."""
        if item.count:
            theirs = struct.unpack(f"<{item.count}Q", link.sums(item.count))
            differ = [Item(i) for i, value in enumerate(theirs, item.first) if plan.known[i] != value]
            with self.changed:
                compared = range(item.first, item.first + item.count)
                ranges = plan.manifest.ranges
                self._given.gauge.done += sum(ranges[i].nbytes for i in compared)
                self._given.gauge.done -= sum(ranges[more.first].nbytes for more in differ)
            return differ
        target = plan.landing(item.first, 0.0)
        assert target is not None  # since it was asked for
        told, value = link.range(target), checksum(target)
        if told != value and not self._live:
            raise HealError(f"the checksum of range {item.first} does not match")
        with self.changed:
            self.bytes += len(target)
            self._given.gauge.done += len(target)
            plan.arrived(item.first, value)
        return []

    def _finish(self, donor: _Donor, link: DonorLink, more: list[Item], *, idle: bool) -> None:
        with self.changed:
            if idle:
                self._open.discard(link)
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
