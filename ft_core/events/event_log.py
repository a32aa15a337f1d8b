"""`EventLog`: takes events from any thread at no cost worth mentioning, and has one thread write them.

How it works. `emit` puts the event into a bounded queue and returns; the writer thread turns what has come into lines
and hands them to `EventFile`. If the queue is full the event is dropped and counted; if the disk cannot take a line,
that is logged once as a warning, events are dropped and counted, and every RETRY_S the writer tries again. When it can
write again, a "dropped" event says how many are missing.

Invariants: `emit` never blocks, never raises and never touches the disk; a process that was forked writes nothing to
its parent's log; `close` is idempotent and takes CLOSE_S at most.
Threads: `emit` from any, also from a signal handler; the file is the writer's ("ft-events-<source>").
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import socket
import threading
import time
import weakref
from typing import Any, Protocol

from ft_core.events.event_file import EventFile
from ft_core.events.schema import NAMES_MAX, TEXT_MAX, VARIABLE, VERSION

QUEUE_MAX = 4096
"""Events that wait to be written."""
BATCH_MAX = 256
"""Events that are written at once."""
RETRY_S = 30.0
CLOSE_S = 2.0
"""How long `close` waits for what is queued: a network disk that hangs must not keep a process from ending."""
NO_LIMIT = 1e18
"""What stands for an infinite number of seconds."""

_log = logging.getLogger("ft_core")


class Events(Protocol):
    """Where events go."""

    @property
    def on(self) -> bool:
        """Whether anybody reads them: if not, nobody need put any together."""

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Note that something has happened, now. Fields: those that the schema has for this kind."""

    def close(self) -> None:
        """Write what is there and end. Idempotent."""


class Silent:
    """Nobody wants events."""

    on = False

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


SILENT = Silent()


def open_events(folder: str, role: str, source: str, release: str = "") -> Events:
    """The log of `source` in a folder, started; `SILENT` if no folder is named."""
    if not folder:
        return SILENT
    log = EventLog(folder, role, source, release)
    log.start()
    return log


class EventLog:
    """One process' or replica's log.

    Args:
        folder: of the job's events.
        role: of `schema.ROLES`.
        source: the name of who writes: of a replica its replica name, which its next process has, too.
        release: of this library.
    """

    def __init__(self, folder: str, role: str, source: str, release: str = "") -> None:
        self.on = True
        self.retry_s = RETRY_S
        self._role, self._source, self._release = role, source, release
        self._offset = time.time() - time.monotonic()  # wall-clock seconds that never jump
        self._file = EventFile(folder, source, f"{time.time_ns() // 1000:x}", self._header)
        self._queue: queue.SimpleQueue[tuple[float, str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._unqueued = 0
        """Events that the queue had no room for."""
        self._unwritten = 0
        """Events that the disk did not take; both are told of when it takes some again."""
        self._why = ""
        self._retry_at = 0.0
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"ft-events-{source}", daemon=True)

    def __repr__(self) -> str:
        state = "open" if self.on else "closed"
        return f"EventLog({self._source}, {state}, {self._queue.qsize()} waiting, {self._unwritten} lost)"

    def start(self) -> None:
        """Start the writer."""
        _live.add(self)
        self._thread.start()

    def emit(self, kind: str, /, **fields: Any) -> None:
        """As `Events.emit`."""
        if not self.on:
            return
        if self._queue.qsize() >= QUEUE_MAX:
            self._unqueued += 1
            return
        self._queue.put((time.monotonic() + self._offset, kind, fields))

    def close(self) -> None:
        """As `Events.close`."""
        if self.on:
            self.emit("closed")
            self.on = False
            self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ the writer

    def _run(self) -> None:
        over = False
        while not over:
            batch = [self._queue.get()]
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get())
            over = None in batch  # what other threads put behind it came too late
            self._write([event for event in batch if event is not None])
        self._file.close()

    def _write(self, events: list[tuple[float, str, dict[str, Any]]]) -> None:
        if time.monotonic() < self._retry_at:
            self._unwritten += len(events)
            return
        unqueued, self._unqueued = self._unqueued, 0
        missing = self._unwritten + unqueued
        if missing and events:
            told = {"events": missing, "reason": self._why or "they came faster than they could be written"}
            events = [(events[0][0], "dropped", told), *events]
        try:
            self._file.write(b"".join(_line(*event) for event in events))
        except OSError as error:
            self._file.close()
            self._unwritten = missing + len(events) - bool(missing)
            self._why, self._retry_at = str(error), time.monotonic() + self.retry_s
            self._warn(error)
        else:
            self._unwritten, self._why = 0, ""

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "events cannot be written (%s): training goes on without them; free the disk, or name another folder "
                "with %s or ftrun --events", error, VARIABLE,
            )  # fmt: skip

    def _header(self, part: int) -> bytes:
        fields = {
            "v": VERSION, "role": self._role, "source": self._source, "host": socket.gethostname(), "pid": os.getpid(),
            "part": part, "release": self._release,
        }  # fmt: skip
        return _line(time.monotonic() + self._offset, "log", fields)


def _line(t: float, kind: str, fields: dict[str, Any]) -> bytes:
    event = {"t": round(t, 6), "kind": kind, **{name: _bounded(value) for name, value in fields.items()}}
    return json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n"


def _bounded(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= TEXT_MAX else value[: TEXT_MAX - 3] + "..."
    if isinstance(value, list | tuple):
        return list(value[:NAMES_MAX])
    if isinstance(value, float):  # JSON knows no infinity
        return round(value, 6) if math.isfinite(value) else NO_LIMIT
    return value


_live: weakref.WeakSet[EventLog] = weakref.WeakSet()


def _forked() -> None:
    """The child has no writer thread, and the file is its parent's."""
    for log in list(_live):
        log.on = False


os.register_at_fork(after_in_child=_forked)
