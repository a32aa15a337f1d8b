"""The account of a job: every second of every group, goodput, gaps by cause, failures. Pure.

How it works. `account` puts together the stories of the groups and the failures, and adds up. A *replica-second* is one
second of one group; the account is over all of them, from the group's first start to its end.

Goodput is told in two ways, because neither says all. `moving`: the part of the time from the first commit to the last
in which at least one group was making a step that was committed, no later than usual. `share`: the part of the
replica-seconds since the first commit that went into committed steps.

Invariant: the seconds of all states together are the replica-seconds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ft_core.events.schema import FTRUN, LIGHTHOUSE, REPLICA
from ft_core.report.failures import Failure, find
from ft_core.report.story import State, Story, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.report.reader import Found, Log

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps of one cause, in seconds beyond a usual step."""

    cause: str
    count: int
    p50_s: float
    p90_s: float
    max_s: float


@dataclass
class Account:
    """Everything that is shown of a job. Instants are wall-clock seconds."""

    begin: float
    end: float
    stories: list[Story]
    quorums: list[Event]
    """`quorum_formed` events, in order."""
    failures: list[Failure]
    seconds: dict[State, float] = field(default_factory=dict)
    waiting: list[tuple[str, float]] = field(default_factory=list)
    """Seconds by whom, or what, was waited for; most first."""
    gaps: list[Gaps] = field(default_factory=list)
    steps: int = 0
    """Committed by the job, first to last."""
    first_commit: float | None = None
    last_commit: float | None = None
    usual_s: float = 0.0
    """A step without disturbance."""
    share: float | None = None
    moving: float | None = None
    healed_bytes: int = 0
    heals: int = 0
    title: str = ""

    @property
    def total_s(self) -> float:
        """Replica-seconds."""
        return sum(self.seconds.values())


def account(found: Found) -> Account:
    """The account of what was read. Raises ValueError if there is nothing."""
    if not found.logs:
        raise ValueError("no events")
    replicas = _by_source(found.of(REPLICA))
    ftrun = sorted((e for log in found.of(FTRUN) for e in log.events), key=_time)
    lighthouse = sorted((e for log in found.of(LIGHTHOUSE) for e in log.events), key=_time)
    about: dict[str, list[Event]] = {name: list(events) for name, events in replicas.items()}
    for event in ftrun:
        if "group" in event:
            about.setdefault(event["group"], []).append(event)
    begin = min(_time(log.events[0]) for log in found.logs)
    end = max(_time(log.events[-1]) for log in found.logs)
    names = sorted(about, key=natural)
    stories = {name: tell(name, about[name], names, end) for name in names}
    result = Account(
        begin, end, list(stories.values()), [e for e in lighthouse if e["kind"] == "quorum_formed"],
        find(stories, replicas, lighthouse, ftrun, _restarts(found.of(LIGHTHOUSE))),
    )  # fmt: skip
    started = next((e for e in ftrun if e["kind"] == "run_started"), None)
    result.title = f"{started['script']}, run {started['run_id']}" if started is not None else "job"
    _add_up(result)
    return result


def _restarts(logs: Sequence[Log]) -> list[float]:
    """When a lighthouse was started again. The two of a pair are told apart by their addresses."""
    known: set[str] = set()
    restarts = []
    for log in sorted(logs, key=lambda log: _time(log.events[0])):
        of_pair = any(event["kind"] == "pair" for event in log.events)
        address = next((e["address"] for e in log.events if e["kind"] == "lighthouse_started"), "")
        if address in known if of_pair else known:
            restarts.append(_time(log.events[0]))
        known.add(address)
    return restarts


def natural(name: str) -> tuple[Any, ...]:
    """Sorts replica-10 behind replica-9."""
    head, _, number = name.rpartition("-")
    return (head, int(number), "") if number.isdecimal() else (name, -1, "")


def _time(event: Event) -> float:
    return float(event["t"])


def _by_source(logs: Sequence[Log]) -> dict[str, list[Event]]:
    out: dict[str, list[Event]] = {}
    for log in logs:
        out.setdefault(log.source, []).extend(log.events)
    for events in out.values():
        events.sort(key=_time)
    return out


def _add_up(result: Account) -> None:
    waits: Counter[str] = Counter()
    for state in State:
        result.seconds[state] = sum(story.seconds(state) for story in result.stories)
    for story in result.stories:
        for segment in story.segments:
            if segment.state is State.WAITING:
                waits[segment.whom or "a quorum"] += segment.seconds  # type: ignore[assignment]
        result.heals += len(story.heals)
        result.healed_bytes += sum(event["bytes"] for event in story.heals)
    result.waiting = [(what, float(seconds)) for what, seconds in waits.most_common()]
    result.gaps = _gaps([gap for story in result.stories for gap in story.gaps])
    _goodput(result)


def _gaps(gaps: Sequence[Event]) -> list[Gaps]:
    by_cause: dict[str, list[float]] = {}
    for gap in gaps:
        by_cause.setdefault(gap["cause"], []).append(max(0.0, gap["seconds_s"] - gap["usual_s"]))
    found = [
        Gaps(cause, len(late), quantile(late, 0.5), quantile(late, 0.9), max(late)) for cause, late in by_cause.items()
    ]
    return sorted(found, key=lambda one: -one.count * one.p50_s)


def quantile(values: Sequence[float], q: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _goodput(result: Account) -> None:
    counters = [event for story in result.stories for event in story.counters if event["commits"]]
    if not counters:
        return
    first, last = min(counters, key=_time), max(counters, key=lambda event: event["step"])
    result.first_commit, result.last_commit = _time(first), _time(last)
    result.steps = last["step"] - first["step"] + first["commits"]
    usual = [event["usual_s"] for event in counters if event["usual_s"]]
    result.usual_s = statistics.median(usual) if usual else 0.0
    since, until = result.first_commit, result.last_commit
    counted = trained = 0.0
    for story in result.stories:
        for segment in story.segments:
            seconds = max(0.0, segment.end - max(since, segment.begin))
            counted += seconds * (segment.state is not State.ENDING)
            trained += seconds * (segment.state is State.TRAINING)
    result.share = trained / counted if counted else None
    if until > since:
        steady = [part for story in result.stories for part in _steady(story)]
        result.moving = covered(steady, since, until) / (until - since)


def _steady(story: Story) -> list[tuple[float, float]]:
    """When a group was making steps, no later than usual."""
    late = [(gap["t"] - max(0.0, gap["seconds_s"] - gap["usual_s"]), gap["t"]) for gap in story.gaps]
    parts = []
    for segment in story.segments:
        if segment.state is not State.TRAINING:
            continue
        begin = segment.begin
        for since, until in late:
            if since < segment.end and until > begin:
                parts.append((begin, max(begin, since)))
                begin = max(begin, min(until, segment.end))
        parts.append((begin, segment.end))
    return parts


def covered(parts: Sequence[tuple[float, float]], since: float, until: float) -> float:
    """How much of a time at least one of the parts covers."""
    total, at = 0.0, since
    for begin, end in sorted(parts):
        begin, end = max(begin, at), min(end, until)
        if end > begin:
            total += end - begin
            at = end
    return total
