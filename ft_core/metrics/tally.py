"""`Tally`: the values of one role's metrics, and which changes it takes. Pure.

How it works. `rules` turn events into changes; `apply` adds, sets or observes. A counter whose labels have enumerated
values is there from the start, with 0, so that its first increase is one; names (of rooms, groups, replicas) appear
when they are first seen. `families` are what is shown.

Invariants: only metrics of `table` and their labels; a value that is not in a label's list is counted as OTHER, and so
are label sets beyond SERIES_MAX. Not thread-safe: `metrics` holds its lock.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ft_core.metrics.table import COUNTER, HISTOGRAM, OTHER, SERIES_MAX, Metric, of_role

Labels = tuple[str, ...]


class Add(NamedTuple):
    """A counter has grown."""

    metric: str
    value: float = 1.0
    labels: Labels = ()


class Put(NamedTuple):
    """A gauge, or a counter that is counted elsewhere, has this value."""

    metric: str
    value: float
    labels: Labels = ()


class Observe(NamedTuple):
    """A histogram has one more value."""

    metric: str
    value: float
    labels: Labels = ()


class PutAll(NamedTuple):
    """A histogram that is counted elsewhere: how many per bucket (one more than bounds), and the sum of the values."""

    metric: str
    counts: Sequence[int]
    total: float
    labels: Labels = ()


Change = Add | Put | Observe | PutAll


@dataclass(slots=True)
class Distribution:
    """What a histogram holds for one set of labels."""

    counts: list[int]
    """Per bucket, not summed up; the last is for what is above all bounds."""
    total: float = 0.0


class Family(NamedTuple):
    """One metric as it is shown."""

    name: str
    metric: Metric
    values: Mapping[Labels, float | Distribution]


class Tally:
    """The values of the metrics of one role."""

    def __init__(self, role: str) -> None:
        self._metrics = of_role(role)
        self._values: dict[str, dict[Labels, float]] = {}
        self._distributions: dict[str, dict[Labels, Distribution]] = {}
        for name, metric in self._metrics.items():
            if metric.kind == HISTOGRAM:
                self._distributions[name] = {}
            else:
                self._values[name] = dict.fromkeys(_known(metric), 0.0) if metric.kind == COUNTER else {}

    def __repr__(self) -> str:
        return f"Tally({len(self._metrics)} metrics, {sum(map(len, self._values.values()))} values)"

    def apply(self, changes: Iterable[Change]) -> None:
        """Take changes. A KeyError or ValueError says that one is of no metric here, or lacks a label."""
        for change in changes:
            metric = self._metrics[change.metric]
            if isinstance(change, Observe | PutAll):
                self._observe(metric, change)
                continue
            values = self._values[change.metric]
            labels = _labels(metric, change.labels, values)
            values[labels] = change.value + (values.get(labels, 0.0) if isinstance(change, Add) else 0.0)

    def replace(self, names: Iterable[str], changes: Iterable[Change]) -> None:
        """Forget all values of these gauges, and take changes: what is not there any more is not shown."""
        for name in names:
            self._values[name].clear()
        self.apply(changes)

    def seen(self, label: str, name: str) -> None:
        """A name of this label is there: its counters begin with 0."""
        for key, metric in self._metrics.items():
            if metric.kind == COUNTER and label in metric.labels:
                values = self._values[key]
                for labels in _known(metric, {label: (name,)}):
                    if len(values) < SERIES_MAX:
                        values.setdefault(labels, 0.0)

    def families(self) -> Iterator[Family]:
        """All that have a value, in the table's order; copies."""
        for name, metric in self._metrics.items():
            if metric.kind == HISTOGRAM:
                held = self._distributions[name]
                yield Family(name, metric, {k: Distribution(list(d.counts), d.total) for k, d in held.items()})
            else:
                yield Family(name, metric, dict(self._values[name]))

    def _observe(self, metric: Metric, change: Observe | PutAll) -> None:
        held = self._distributions[change.metric]
        labels = _labels(metric, change.labels, held)
        if isinstance(change, PutAll):
            if len(change.counts) != len(metric.bounds) + 1:
                raise ValueError(f"{change.metric}: {len(change.counts)} counts for {len(metric.bounds)} bounds")
            held[labels] = Distribution(list(change.counts), change.total)
            return
        found = held.setdefault(labels, Distribution([0] * (len(metric.bounds) + 1)))
        found.counts[bisect_left(metric.bounds, change.value)] += 1
        found.total += change.value


def _known(metric: Metric, names: Mapping[str, Sequence[str]] | None = None) -> Iterator[Labels]:
    """All sets of labels whose values are enumerated, or among `names`."""
    given = names or {}
    return itertools.product(*(values or given.get(label, ()) for label, values in metric.labels.items()))


def _labels(metric: Metric, given: Labels, held: Mapping[Labels, object]) -> Labels:
    """The labels to count under."""
    pairs = zip(metric.labels.values(), given, strict=True)
    labels = tuple(value if not values or value in values else OTHER for values, value in pairs)
    if labels in held or len(held) < SERIES_MAX:
        return labels
    return tuple(label if values else OTHER for values, label in zip(metric.labels.values(), labels, strict=True))
