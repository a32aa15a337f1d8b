"""What an event of the job's log changes in the metrics: one function for each kind of event, in a table. Pure.

How it works. `RULES[role][kind]` takes what is known so far, the time and the fields of an event, and returns changes
for `tally`. What has to be remembered between two events (since when a group is down, what a replica does) is in
`Known`. `at_scrape` is what depends on the time at which somebody looks.

Invariants: an event that lacks a field is a KeyError here, never a wrong value; kinds without a rule change nothing;
what is remembered is bounded by the number of groups (MAX_REPLICAS of a job). Times are wall-clock seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_core.events.schema import FTRUN, LIGHTHOUSE, REPLICA
from ft_core.metrics.table import (
    CHAOS,
    COLD,
    ENDED,
    ERROR,
    FAILED,
    HEALING,
    OK,
    PAUSED,
    SIGNAL,
    STALL,
    START,
    STARTING,
    STATES,
    TRAINING,
    WAITING,
    WARM,
)
from ft_core.metrics.tally import Add, Change, Observe, Put, PutAll

Fields = Mapping[str, Any]
STOOD_STILL = "it stood still"
"""How ftrun's reason begins where it has ended a group that hung (`launch.agent`)."""


@dataclass
class Known:
    """What is remembered between events of one log."""

    born: float
    """When this process, or this Manager in it, began (wall clock)."""
    first_commit_at: float = 0.0
    trained_s: float = 0.0
    commits: int = 0
    healing: bool = False
    waiting: bool = False
    pauses: int = 0
    """That are open."""
    base: str = STARTING
    """What it does if it neither waits, nor heals, nor pauses."""
    down: dict[str, float] = field(default_factory=dict)
    """Groups that have failed and were not started again, and since when."""

    def state(self) -> Iterable[Change]:
        """What the replica does now."""
        now = PAUSED if self.pauses else HEALING if self.healing else WAITING if self.waiting else self.base
        now = ENDED if self.base == ENDED else now
        return [Put("ft_state", float(state == now), (state,)) for state in STATES]


Rule = Callable[[Known, float, Fields], Iterable[Change]]


# ---------------------------------------------------------------- a replica


def _made(known: Known, _: float, event: Fields) -> Iterable[Change]:
    return [Put("ft_step", event["step"]), *known.state()]


def _prefetch_begun(known: Known, _: float, __: Fields) -> Iterable[Change]:
    known.healing = True
    return known.state()


def _prefetch_ended(known: Known, _: float, event: Fields) -> Iterable[Change]:
    known.healing = False
    return [Add("ft_prefetch_bytes_total", event["bytes"]), *known.state()]


def _asking(known: Known, _: float, __: Fields) -> Iterable[Change]:
    known.waiting = True
    return known.state()


def _entered(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [
        Add("ft_quorum_changes_total", 1, (event["cause"],)),
        Put("ft_members", len(event["members"])),
    ]


def _formed(known: Known, _: float, __: Fields) -> Iterable[Change]:
    known.waiting, known.base = False, TRAINING
    return known.state()


def _broken(known: Known, _: float, __: Fields) -> Iterable[Change]:
    known.waiting = True
    return [Add("ft_quorum_breaks_total"), *known.state()]


def _vetoed(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [Add("ft_vetoes_total", event["attempts"], (event["cause"],))]


def _heal_begun(known: Known, _: float, __: Fields) -> Iterable[Change]:
    known.healing = True
    return known.state()


def _heal_ended(known: Known, _: float, event: Fields) -> Iterable[Change]:
    known.healing = False
    changes = [Add("ft_heals_total", 1, (OK if event["ok"] else FAILED,)), Add("ft_heal_bytes_total", event["bytes"])]
    if event["ok"]:
        changes.append(Observe("ft_heal_seconds", event["seconds_s"]))  # type: ignore[arg-type]
    return [*changes, *known.state()]


def _pause_begun(known: Known, _: float, __: Fields) -> Iterable[Change]:
    known.pauses += 1
    return known.state()


def _pause_ended(known: Known, _: float, event: Fields) -> Iterable[Change]:
    known.pauses = max(0, known.pauses - 1)
    return [Add("ft_pause_seconds_total", event["seconds_s"]), *known.state()]


def _gap(_: Known, __: float, event: Fields) -> Iterable[Change]:
    late_s = max(0.0, event["seconds_s"] - event["usual_s"])
    cause = (event["cause"],)
    return [Observe("ft_gap_seconds", late_s, cause), Add("ft_lost_seconds_total", late_s, cause)]


def _counters(known: Known, t: float, event: Fields) -> Iterable[Change]:
    known.trained_s = event["trained_s"]
    changes: list[Change] = [
        Put("ft_commits_total", event["commits"]),
        Put("ft_step", event["step"]),
        Put("ft_usual_step_seconds", event["usual_s"]),
        Put("ft_trained_seconds_total", event["trained_s"]),
        PutAll("ft_vote_seconds", event["votes"], event["voted_s"]),
    ]
    if event["commits"] > known.commits:
        if not known.first_commit_at:  # counters are written at the first step that ends
            known.first_commit_at = t
            changes.append(Add("ft_lost_seconds_total", max(0.0, t - known.born), (START,)))
        known.commits = event["commits"]
        changes.append(Put("ft_last_commit_timestamp_seconds", t))
    return changes


def _left(known: Known, _: float, __: Fields) -> Iterable[Change]:
    known.base = ENDED
    return known.state()


# ---------------------------------------------------------------- the lighthouse


def _lighthouse_started(_: Known, t: float, __: Fields) -> Iterable[Change]:
    return [Put("ft_lighthouse_start_timestamp_seconds", t)]


def _counted(metric: str) -> Rule:
    """One more in its room."""
    return lambda _, __, event: [Add(metric, 1, (event["room"],))]


def _quorum_formed(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [Add("ft_lighthouse_quorum_changes_total", 1, (event["room"], event["cause"]))]


def _member_lost(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [Add("ft_lighthouse_members_lost_total", 1, (event["room"], event["sign"]))]


def _pair(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [Add("ft_lighthouse_takeovers_total")] if event["took_over"] else []


def _stood_still(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [Add("ft_lighthouse_stall_seconds_total", event["seconds_s"])]


# ---------------------------------------------------------------- ftrun


def _run_started(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [Put("ft_ftrun_groups", len(event["groups"]))]


def _resized(_: Known, __: float, event: Fields) -> Iterable[Change]:
    return [Put("ft_ftrun_groups", event["groups"])]


def _started(known: Known, t: float, event: Fields) -> Iterable[Change]:
    group, since = event["group"], known.down.pop(event["group"], None)
    changes = [Add("ft_ftrun_starts_total", 1, (group, WARM if event["warm"] else COLD))]
    if since is not None:
        changes += [
            Add("ft_ftrun_restarts_total", 1, (group,)),
            Add("ft_ftrun_down_seconds_total", max(0.0, t - since), (group,)),
        ]
    return changes


def _failed(known: Known, _: float, event: Fields) -> Iterable[Change]:
    known.down[event["group"]] = event["at_s"]
    excuse = event["excuse"]
    cause = SIGNAL if event["code"] < 0 else ERROR
    if excuse:
        cause = STALL if excuse.startswith(STOOD_STILL) else CHAOS
    return [Add("ft_ftrun_failures_total", 1, (event["group"], cause))]


def _ended(known: Known, _: float, event: Fields) -> Iterable[Change]:
    known.down.pop(event["group"], None)
    return [Add("ft_ftrun_ended_total", 1, (event["how"],))]


RULES: Mapping[str, Mapping[str, Rule]] = {
    REPLICA: {
        "made": _made, "prefetch_begun": _prefetch_begun, "prefetch_ended": _prefetch_ended, "asking": _asking,
        "entered": _entered, "formed": _formed, "broken": _broken, "vetoed": _vetoed, "heal_begun": _heal_begun,
        "heal_ended": _heal_ended, "pause_begun": _pause_begun, "pause_ended": _pause_ended, "gap": _gap,
        "counters": _counters, "left": _left,
    },
    LIGHTHOUSE: {
        "lighthouse_started": _lighthouse_started, "lease_opened": _counted("ft_lighthouse_leases_opened_total"),
        "lease_ended": _counted("ft_lighthouse_leases_ended_total"), "quorum_formed": _quorum_formed,
        "member_lost": _member_lost, "goodbye": _counted("ft_lighthouse_goodbyes_total"),
        "refused": _counted("ft_lighthouse_refusals_total"), "stood_still": _stood_still,
        "pair": _pair,
    },
    FTRUN: {
        "run_started": _run_started, "started": _started, "failed": _failed, "ended": _ended, "resized": _resized,
    },
}  # fmt: skip
SEEN: Mapping[str, Mapping[str, str]] = {
    LIGHTHOUSE: {"lease_opened": "room"},
    FTRUN: {"started": "group"},
}
"""Kinds of events with which a name is first seen, and of which label it is."""


def at_scrape(known: Known, now: float) -> Iterable[Change]:
    """Changes of values that depend on when somebody looks."""
    if known.trained_s and now > known.first_commit_at:  # its first second would be one without any training
        return [Put("ft_goodput_ratio", min(1.0, known.trained_s / (now - known.first_commit_at)))]
    return []
