"""The list of metrics: Prometheus' conventions, and that the page about it says the same."""

from __future__ import annotations

import pathlib
import re

from ft_core.events.schema import ROLES
from ft_core.metrics.table import COUNTER, GAUGE, HISTOGRAM, METRICS, NAMES

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_page_has_every_metric_as_it_is() -> None:
    rows = re.findall(r"^\| `(ft_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}
    assert told == {name: (metric.kind, set(metric.labels), metric.text) for name, metric in METRICS.items()}


def test_the_page_has_every_value_of_every_label() -> None:
    labels = PAGE.read_text().partition("### Labels")[2]
    for metric in METRICS.values():
        for label, values in metric.labels.items():
            assert f"`{label}`" in labels
            assert [value for value in values if value not in labels] == []


def test_names_are_prometheus() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"ft_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == (metric.kind == COUNTER), name
        assert metric.kind != HISTOGRAM or (name.endswith("_seconds") and metric.bounds == tuple(sorted(metric.bounds)))
        assert metric.text.endswith("."), name
        assert "|" not in metric.text
        if "second" in metric.text.lower().split() and metric.kind == GAUGE:
            assert name.endswith("_seconds"), name
        prefix = {"replica": "ft_", "lighthouse": "ft_lighthouse_", "ftrun": "ft_ftrun_"}[metric.role]
        assert name.startswith(prefix)
        assert metric.role != "replica" or not name.startswith(("ft_lighthouse_", "ft_ftrun_"))
    assert {metric.role for metric in METRICS.values()} == set(ROLES)


def test_labels_are_few() -> None:
    """Sets of enumerated values of one metric, in one process or of one name."""
    for name, metric in METRICS.items():
        sets = 1
        for values in metric.labels.values():
            sets *= len(values) or 1
        assert sets <= 12, name
        assert all(re.fullmatch(r"[a-z]+( [a-z]+)*", value) for values in metric.labels.values() for value in values)
        assert {label for label, values in metric.labels.items() if values == NAMES} <= {"room", "replica", "group"}
