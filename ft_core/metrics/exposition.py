"""What Prometheus reads: the values of one or several `Metrics`, written by prometheus_client.

How it works. A `Page` is a collector in a registry of its own (never the process' default one, which is the script's).
The library's formats, its negotiation and its metrics of the process itself (`process_...`) are used; its Counter and
Gauge are not: they cannot take totals that are counted elsewhere, and under PROMETHEUS_MULTIPROC_DIR, which a script
may set for itself, they write files.

Invariants: `missing` names what is not installed in one sentence, and nothing here is imported before somebody wants
metrics. Threads: any; `Metrics` has the lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ft_core.metrics.table import COUNTER, HISTOGRAM
from ft_core.metrics.tally import Distribution, Family

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from ft_core.metrics.metrics import Metrics

MISSING = (
    "no metrics are served: prometheus_client is not installed (pip install 'ft-training[metrics]'); everything else "
    "goes on"
)


@functools.cache
def missing() -> str:
    """What keeps metrics from being served, as a sentence; '': nothing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        return MISSING
    return ""


class Page:
    """What stands at /metrics. Raises ImportError where prometheus_client is not installed (see `missing`)."""

    def __init__(self, shown: Sequence[Metrics]) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._shown = list(shown)
        self._registry = CollectorRegistry()
        self._registry.register(self)  # it has `collect`
        ProcessCollector(registry=self._registry)

    def __repr__(self) -> str:
        return f"Page({', '.join(metrics.role for metrics in self._shown)})"

    def add(self, metrics: Metrics) -> None:
        """Show these, too."""
        self._shown = [*self._shown, metrics]  # replaced, not changed: another thread may go through it

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        for metrics in self._shown:
            names, values = tuple(metrics.constant), tuple(metrics.constant.values())
            for family in metrics.families():
                if family.values:
                    yield _written(family, names, values)

    def drain(self) -> None:
        """Count what has come."""
        for metrics in self._shown:
            metrics.drain()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, for a request that accepts these types. Any thread; takes milliseconds."""
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def application(self) -> Callable[..., Any]:
        """The page as a WSGI application."""
        from prometheus_client import make_wsgi_app

        return make_wsgi_app(self._registry)


def _written(family: Family, names: tuple[str, ...], constant: tuple[str, ...]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels, metric = (*names, *family.metric.labels), family.metric
    if metric.kind == HISTOGRAM:
        written = HistogramMetricFamily(family.name, metric.text, labels=labels)
        for key, value in family.values.items():
            assert isinstance(value, Distribution)
            written.add_metric([*constant, *key], _buckets(metric.bounds, value.counts), value.total)
        return written
    kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    plain = kind(family.name, metric.text, labels=labels)
    for key, value in family.values.items():
        assert not isinstance(value, Distribution)
        plain.add_metric([*constant, *key], value)
    return plain


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    from prometheus_client.utils import floatToGoString

    found, total = [], 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        found.append((str(floatToGoString(bound)), float(total)))  # type: ignore[no-untyped-call]
    return found
