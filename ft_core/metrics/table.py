"""Every metric: its name, what kind it is, what it says, its labels with the values they may have. Pure.

How it works. `METRICS` is the whole list; docs/metrics.md has the same table (a test compares them), and `tally` takes
no other names, labels or values. Names follow Prometheus: base units, `_total` for what only grows.

Invariants: a label has an enumerated set of values, or is the name of a replica, a room or a group, of which there are
at most SERIES_MAX; sentences are never labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ft_core.events.schema import (
    FTRUN,
    GAP_CAUSES,
    LIGHTHOUSE,
    LOSS_SIGNS,
    PAIR_ROLES,
    QUORUM_CAUSES,
    REPLICA,
    VETO_CAUSES,
    VOTE_BOUNDS_S,
)

SERIES_MAX = 1024
"""Sets of label values of one metric; what comes beyond is counted under OTHER."""
OTHER = "other"
"""Stands for a value that is not in a label's list, and for names beyond SERIES_MAX."""

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

GAP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
HEAL_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper ends of the buckets of histograms."""

START = "start"
"""What lost seconds are called before the first commit of a process."""
STARTING, WAITING, HEALING, PAUSED, TRAINING, ENDED = "starting", "waiting", "healing", "paused", "training", "ended"
STATES = (STARTING, WAITING, HEALING, PAUSED, TRAINING, ENDED)
"""What a replica does."""
OK, FAILED = "ok", "failed"
COLD, WARM = "cold", "warm"
SIGNAL, ERROR, STALL, CHAOS = "signal", "error", "stall", "chaos"
FAILURES = (SIGNAL, ERROR, STALL, CHAOS)
"""How a group failed: a worker was ended by a signal, or by itself; it stood still; because of --chaos."""
ENDS = ("finished", "drained", "quarantined", "stopped", "missed", "failed")
"""How a group ends for good (`launch.exit_status.KINDS`)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    role: str
    """Who serves it: of `events.schema.ROLES`."""
    kind: str
    text: str
    """What it says."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The values of each label; (): names, of which there are not many."""
    bounds: tuple[float, ...] = ()
    """Of a histogram."""


NAMES: tuple[str, ...] = ()
"""The values of a label are names."""


def _metric(
    role: str, kind: str, text: str, bounds: tuple[float, ...] = (), /, **labels: tuple[str, ...]
) -> Metric:  # fmt: skip
    return Metric(role, kind, text, MappingProxyType(labels), bounds)


METRICS: Mapping[str, Metric] = MappingProxyType({
    # ------------------------------------------------------------ a replica
    "ft_step": _metric(REPLICA, GAUGE, "The newest committed step that this replica holds."),
    "ft_commits_total": _metric(REPLICA, COUNTER, "Steps committed since its Manager was made."),
    "ft_last_commit_timestamp_seconds": _metric(
        REPLICA, GAUGE, "When it committed last, to the second (seconds since 1970)."
    ),
    "ft_vetoes_total": _metric(REPLICA, COUNTER, "Attempts that all members agreed to skip.", cause=VETO_CAUSES),
    "ft_quorum_changes_total": _metric(
        REPLICA, COUNTER, "Quorums that this replica entered, by what had changed.", reason=QUORUM_CAUSES
    ),
    "ft_quorum_breaks_total": _metric(REPLICA, COUNTER, "Quorums that broke while it was in them."),
    "ft_members": _metric(REPLICA, GAUGE, "Members of the quorum that it entered last."),
    "ft_state": _metric(REPLICA, GAUGE, "1 for what this replica does, 0 for the rest.", state=STATES),
    "ft_gap_seconds": _metric(
        REPLICA, HISTOGRAM, "By how much a commit came later than usual, by what disturbed it first.", GAP_BOUNDS_S,
        cause=GAP_CAUSES,
    ),
    "ft_lost_seconds_total": _metric(
        REPLICA, COUNTER, "Seconds in which this process made no step, by what cost them; start: before its first.",
        cause=(START, *GAP_CAUSES),
    ),
    "ft_trained_seconds_total": _metric(
        REPLICA, COUNTER, "Seconds that went into committed steps, none of them taken as longer than usual."
    ),
    "ft_goodput_ratio": _metric(
        REPLICA, GAUGE, "ft_trained_seconds_total over the time since the first commit of this process."
    ),
    "ft_usual_step_seconds": _metric(REPLICA, GAUGE, "How long an undisturbed step takes, smoothed."),
    "ft_vote_seconds": _metric(
        REPLICA, HISTOGRAM, "How long should_commit waited for the verdict: for the slowest member, mostly.",
        VOTE_BOUNDS_S,
    ),
    "ft_heals_total": _metric(REPLICA, COUNTER, "Heals: state received from other members.", outcome=(OK, FAILED)),
    "ft_heal_bytes_total": _metric(REPLICA, COUNTER, "Bytes of state received in heals."),
    "ft_heal_seconds": _metric(REPLICA, HISTOGRAM, "How long heals that succeeded took to receive.", HEAL_BOUNDS_S),
    "ft_prefetch_bytes_total": _metric(REPLICA, COUNTER, "Bytes of live state copied before joining."),
    "ft_pause_seconds_total": _metric(REPLICA, COUNTER, "Seconds in which the script had announced to be busy."),
    "ft_lease_age_seconds": _metric(
        REPLICA, GAUGE, "Since when the lighthouse has acknowledged nothing; beyond autonomy_s (600) training waits."
    ),
    # ------------------------------------------------------------ the lighthouse
    "ft_lighthouse_quorum_changes_total": _metric(
        LIGHTHOUSE, COUNTER, "Quorums formed, by what had changed.", room=NAMES, reason=QUORUM_CAUSES
    ),
    "ft_lighthouse_members_lost_total": _metric(
        LIGHTHOUSE, COUNTER, "Members that were lost, by how it was noticed.", room=NAMES,
        sign=LOSS_SIGNS,
    ),
    "ft_lighthouse_leases_opened_total": _metric(
        LIGHTHOUSE, COUNTER, "Connections of replicas, first and again.", room=NAMES
    ),
    "ft_lighthouse_leases_ended_total": _metric(
        LIGHTHOUSE, COUNTER, "Connections that ended without a goodbye.", room=NAMES
    ),
    "ft_lighthouse_goodbyes_total": _metric(LIGHTHOUSE, COUNTER, "Replicas that left.", room=NAMES),
    "ft_lighthouse_refusals_total": _metric(LIGHTHOUSE, COUNTER, "Replicas refused for good.", room=NAMES),
    "ft_lighthouse_stall_seconds_total": _metric(
        LIGHTHOUSE, COUNTER, "Seconds in which the lighthouse itself stood still."
    ),
    "ft_lighthouse_start_timestamp_seconds": _metric(
        LIGHTHOUSE, GAUGE, "When it began to listen (seconds since 1970)."
    ),
    "ft_lighthouse_role": _metric(
        LIGHTHOUSE, GAUGE, "Of a pair: 1 for what this lighthouse does, 0 for the rest. One that is alone has none.",
        role=PAIR_ROLES,
    ),
    "ft_lighthouse_contact": _metric(
        LIGHTHOUSE, GAUGE, "Of a pair: 1 while each of the two hears the other, 0: nobody could take its place."
    ),
    "ft_lighthouse_takeovers_total": _metric(
        LIGHTHOUSE, COUNTER, "How often this lighthouse stood by and took the place of the other one of its pair."
    ),
    "ft_lighthouse_members": _metric(LIGHTHOUSE, GAUGE, "Members of the quorum in force; 0: none is.", room=NAMES),
    "ft_lighthouse_replicas": _metric(LIGHTHOUSE, GAUGE, "Replicas that hold a lease.", room=NAMES),
    "ft_lighthouse_waiting": _metric(LIGHTHOUSE, GAUGE, "Replicas that have asked and wait for a quorum.", room=NAMES),
    "ft_lighthouse_stalled": _metric(
        LIGHTHOUSE, GAUGE, "Replicas that are alive and stand still while others wait for them.", room=NAMES
    ),
    "ft_lighthouse_step": _metric(LIGHTHOUSE, GAUGE, "The newest step that a replica reported.", room=NAMES),
    "ft_lighthouse_lease_age_seconds": _metric(
        LIGHTHOUSE, GAUGE, "Since when nothing has come over the lease of a replica.", room=NAMES, replica=NAMES
    ),
    # ------------------------------------------------------------ ftrun
    "ft_ftrun_groups": _metric(FTRUN, GAUGE, "Replica groups that this ftrun is to run."),
    "ft_ftrun_starts_total": _metric(
        FTRUN, COUNTER, "Starts of a group's processes; warm: a standby process was adopted.", group=NAMES,
        start=(COLD, WARM),
    ),
    "ft_ftrun_restarts_total": _metric(FTRUN, COUNTER, "Starts after a failure.", group=NAMES),
    "ft_ftrun_failures_total": _metric(FTRUN, COUNTER, "Failures of a group, by how.", group=NAMES, cause=FAILURES),
    "ft_ftrun_down_seconds_total": _metric(
        FTRUN, COUNTER, "Seconds from a failure until its processes were started again.", group=NAMES
    ),
    "ft_ftrun_ended_total": _metric(FTRUN, COUNTER, "Groups that ended for good, by how.", how=ENDS),
    # ------------------------------------------------------------ each of them
    **{
        name: _metric(role, COUNTER, "Events that came faster than they could be counted: other counters lack them.")
        for name, role in (
            ("ft_metrics_dropped_total", REPLICA),
            ("ft_lighthouse_metrics_dropped_total", LIGHTHOUSE),
            ("ft_ftrun_metrics_dropped_total", FTRUN),
        )
    },
})  # fmt: skip
"""In the order in which they are shown."""

SAMPLED: Mapping[str, tuple[str, ...]] = {
    REPLICA: ("ft_lease_age_seconds",),
    LIGHTHOUSE: tuple(name for name, metric in METRICS.items() if metric.role == LIGHTHOUSE and metric.kind == GAUGE
                      and name != "ft_lighthouse_start_timestamp_seconds"),
    FTRUN: (),
}  # fmt: skip
"""Gauges that no event sets: they are looked up when somebody asks."""


def of_role(role: str) -> Mapping[str, Metric]:
    """The metrics that a role serves."""
    return {name: metric for name, metric in METRICS.items() if metric.role == role}
