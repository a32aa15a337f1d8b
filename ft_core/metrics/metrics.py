"""`Metrics`: counts what the job's events say, beside the log that writes them, and shows it to who asks.

How it works. `emit` puts an event into a bounded queue, as the log does, and wakes nobody. Once in DRAIN_S, and
whenever somebody looks, a server's thread applies what has come (`rules`) to the values (`tally`). What is not an event
(leases of a lighthouse) is asked for when somebody looks: `sampled` returns it, and must not wait.

Invariants: `emit` never blocks and never raises; the lock is never taken by a thread that trains or decides; a process
that was forked counts nothing; an event that does not fit is logged once, and the others count.
Threads: `emit` from any; `drain` and `families` from the server's and from those that look, under one lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ft_core.metrics.rules import RULES, SEEN, Known, at_scrape
from ft_core.metrics.table import SAMPLED
from ft_core.metrics.tally import Add, Change, Family, Tally

if TYPE_CHECKING:
    from ft_core.events.event_log import Events

WAITING_MAX = 4096
"""Events that wait to be counted."""
DRAIN_S = 1.0
"""How often they are, if nobody looks."""
DROPPED = {"replica": "ft_metrics_dropped_total", "lighthouse": "ft_lighthouse_metrics_dropped_total",
           "ftrun": "ft_ftrun_metrics_dropped_total"}  # fmt: skip
"""By role: where events are counted that found no room."""

_log = logging.getLogger("ft_core")


class Metrics:
    """The metrics of one role in one process. It is an `Events`, which `beside` puts next to the log.

    Args:
        role: of `events.schema.ROLES`.
        constant: labels, with their values, that everything here carries.
        sampled: what is to be looked up when somebody asks, as changes; called on the asking thread.
        born: when what is counted began (wall clock, seconds); None: now.
    """

    on = True

    def __init__(
        self,
        role: str,
        constant: Mapping[str, str] | None = None,
        sampled: Callable[[], Iterable[Change]] | None = None,
        born: float | None = None,
    ) -> None:
        self.role, self.constant = role, dict(constant or {})
        self._sampled = sampled
        self._rules, self._seen = RULES[role], SEEN.get(role, {})
        self._offset = time.time() - time.monotonic()  # wall-clock seconds that never jump
        self._known = Known(time.time() if born is None else born)
        self._tally = Tally(role)
        self._waiting: deque[tuple[float, str, dict[str, Any]]] = deque()
        self._dropped = 0
        self._lock = threading.Lock()
        self._warned = False
        self.ends: Callable[[], None] | None = None
        """Ends what serves them; called by `close`."""
        _live.add(self)

    def __repr__(self) -> str:
        return f"Metrics({self.role}, {len(self._waiting)} waiting)"

    def emit(self, kind: str, /, **fields: Any) -> None:
        """As `Events.emit`."""
        if kind not in self._rules or not self.on:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._dropped += 1
            return
        self._waiting.append((time.monotonic() + self._offset, kind, fields))

    def close(self) -> None:
        """End what serves them. Whoever looks later sees the last values. As `Events.close`."""
        ends, self.ends = self.ends, None
        if ends is not None:
            ends()

    # ------------------------------------------------------------ those who look

    def drain(self) -> None:
        """Count what has come."""
        with self._lock:
            self._drain()

    def families(self) -> list[Family]:
        """Everything as it is now."""
        sampled = self._look()
        with self._lock:
            self._drain()
            self._tally.apply(at_scrape(self._known, time.monotonic() + self._offset))
            self._tally.replace(SAMPLED[self.role], sampled)
            return list(self._tally.families())

    def _look(self) -> Iterable[Change]:
        if self._sampled is None:
            return ()
        try:
            return list(self._sampled())
        except Exception as error:  # noqa: BLE001 - what is counted is shown all the same
            self._warn(f"what is looked up at a scrape is missing: {error!r}")
            return ()

    def _drain(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self._tally.apply([Add(DROPPED[self.role], dropped)])
        for _ in range(len(self._waiting)):
            t, kind, fields = self._waiting.popleft()
            try:
                if kind in self._seen:
                    label = self._seen[kind]
                    self._tally.seen(label, str(fields[label]))
                self._tally.apply(self._rules[kind](self._known, t, fields))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self._warn(f"an event {kind!r} was not counted: {error!r}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("metrics: %s", what)


class Both:
    """The job's log, and the metrics beside it."""

    def __init__(self, log: Events, metrics: Metrics) -> None:
        self._log, self._metrics = log, metrics

    def __repr__(self) -> str:
        return f"Both({self._log!r}, {self._metrics!r})"

    @property
    def on(self) -> bool:
        """As `Events.on`."""
        return self._metrics.on or self._log.on

    def emit(self, kind: str, /, **fields: Any) -> None:
        """As `Events.emit`."""
        self._log.emit(kind, **fields)
        self._metrics.emit(kind, **fields)

    def close(self) -> None:
        """As `Events.close`."""
        self._log.close()
        self._metrics.close()


def beside(log: Events, metrics: Metrics | None) -> Events:
    """Where events go that are written to a log, and counted if there are metrics."""
    return log if metrics is None else Both(log, metrics)


_live: weakref.WeakSet[Metrics] = weakref.WeakSet()


def _forked() -> None:
    """The child counts nothing: whoever asks for metrics asks its parent."""
    for metrics in list(_live):
        metrics.on = False
        metrics._waiting.clear()


os.register_at_fork(after_in_child=_forked)
