"""Reads the event files of a job: whatever is there and can be read, and in words what could not.

How it works. Every `*.jsonl` file below the folders is looked at; its first line says who wrote it, and in which
version of the schema. Parts of one process are put together in order. Of a folder with several runs of ftrun the last
one is taken.

Invariants: a file of another version is left out and named; a line that is cut, or no event, is left out and counted;
nothing in a file raises. At most EVENTS_MAX events are read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ft_core.events.schema import FTRUN, ROLES, SUFFIX, VERSION, lacks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EVENTS_MAX = 5_000_000
LINE_MAX = 1 << 20
"""Bytes; a longer line is no event."""

Event = dict[str, Any]


@dataclass
class Log:
    """What one process has written."""

    role: str
    source: str
    host: str
    pid: int
    events: list[Event] = field(default_factory=list)


@dataclass
class Found:
    """What is known of a job."""

    logs: list[Log] = field(default_factory=list)
    """In the order in which they begin; none is empty."""
    problems: list[str] = field(default_factory=list)
    """Sentences about what could not be used."""

    def of(self, role: str) -> list[Log]:
        """The logs of lighthouses, of ftruns or of replicas."""
        return [log for log in self.logs if log.role == role]


def read(folders: Sequence[str]) -> Found:
    """All events below the folders. Raises OSError if one of them cannot be listed."""
    found, left = Found(), EVENTS_MAX
    logs: dict[tuple[str, str], Log] = {}
    parts: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for path in sorted(path for folder in folders for path in _files(folder)):
        stem, part = _stem(path)
        parts.setdefault((os.path.dirname(path), stem), []).append((part, path))
    for key, numbered in parts.items():
        numbered.sort()
        if numbered[0][0] > 0:
            found.problems.append(f"{key[1]}: its oldest {numbered[0][0]} files are gone (a log is bounded)")
        for _, path in numbered:
            log = _file(path, found.problems, left)
            if log is not None and log.events:
                left -= len(log.events)
                logs.setdefault(key, log)
                if logs[key] is not log:
                    logs[key].events += log.events
    if left <= 0:
        found.problems.append(f"only {EVENTS_MAX} events were read: name fewer folders")
    for log in logs.values():
        log.events.sort(key=_time)
        lost = sum(event["events"] for event in log.events if event["kind"] == "dropped")
        if lost:
            found.problems.append(f"{log.source} (pid {log.pid}): {lost} events could not be written")
    found.logs = sorted(logs.values(), key=lambda log: _time(log.events[0]))
    _last_run(found)
    return found


def _files(folder: str) -> Iterable[str]:
    if os.path.isfile(folder):
        return [folder]
    os.listdir(folder)  # raises what os.walk would hide
    return [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(SUFFIX)]


def _stem(path: str) -> tuple[str, int]:
    """The name of a log, and the number of this part of it."""
    stem, _, part = os.path.basename(path).removesuffix(SUFFIX).rpartition(".")
    return (stem, int(part)) if stem and part.isdecimal() else (os.path.basename(path), 0)


def _time(event: Event) -> float:
    return float(event["t"])


def _file(path: str, problems: list[str], limit: int) -> Log | None:
    """One part; None if it cannot be used at all."""
    name = os.path.basename(path)
    try:
        with open(path, "rb") as file:
            first = file.readline(LINE_MAX)
            if not first:
                problems.append(f"{name}: is empty, nothing could be written")
                return None
            head = _event(first)
            if head is None or head.get("kind") != "log":
                problems.append(f"{name}: no event file, its first line does not say who wrote it; left out")
                return None
            if head.get("v") != VERSION:
                problems.append(f"{name}: version {head.get('v')} of events, this ft-report reads {VERSION}; left out")
                return None
            if lacks(head) or head["role"] not in ROLES:
                problems.append(f"{name}: its first line is {lacks(head) or 'of an unknown role'}; left out")
                return None
            log = Log(head["role"], head["source"], head["host"], head["pid"])
            bad = 0
            while len(log.events) < limit and (line := file.readline(LINE_MAX)):
                event = _event(line)
                if event is None or (event.get("kind") != "log" and lacks(event)):
                    bad += event is None or not str(lacks(event)).startswith("of an unknown kind")
                elif event["kind"] != "log":
                    log.events.append(event)
    except OSError as error:
        problems.append(f"{name}: cannot be read ({error.strerror}); left out")
        return None
    if bad:
        problems.append(f"{name}: {bad} line{'s are' if bad > 1 else ' is'} cut or damaged; the rest is used")
    return log


def _event(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _last_run(found: Found) -> None:
    """Where a folder holds several runs of one ftrun, forget what came before the last."""
    begins: dict[str, list[float]] = {}
    for log in found.of(FTRUN):
        begins.setdefault(log.source, []).extend(_time(e) for e in log.events if e["kind"] == "run_started")
    runs = max((len(times) for times in begins.values()), default=0)
    if runs < 2:
        return
    since = min(max(times) for times in begins.values() if times) - 1.0  # an embedded lighthouse is started before
    for log in found.logs:
        log.events = [event for event in log.events if _time(event) >= since]
    found.logs = [log for log in found.logs if log.events]
    found.problems.append(f"{runs} runs of ftrun have written here: this is about the last one")
