"""The alerts, the dashboard and the configuration that users begin with: sound, about metrics that there are."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any

import pytest
import yaml

from ft_core.metrics.table import HISTOGRAM, METRICS
from tests.metrics.prometheus import MONITORING, promtool

HERE = pathlib.Path(__file__).parent
NAME = re.compile(r"\bft_[a-z_]+\b")
RECORDED = re.compile(r"\bft:[a-z0-9_:]+\b")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """All queries of alerts and dashboard."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    notes = [note["expr"] for note in dashboard["annotations"]["list"]]
    return [*(rule["expr"] for rule in rules()), *panels, *notes]


def names() -> set[str]:
    """What a query may name: histograms have three names."""
    found = set()
    for name, metric in METRICS.items():
        found |= {f"{name}_{part}" for part in ("bucket", "count", "sum")} if metric.kind == HISTOGRAM else {name}
    return found


def test_queries_name_metrics_and_labels_that_there_are() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for query in expressions():
        used = {name for name in NAME.findall(query) if not name.endswith("_")}  # a pattern: ft_.*dropped_total
        assert used <= names() | {"ft_"}, query
        assert set(RECORDED.findall(query)) <= recorded, query
        for name, label, value in re.findall(r'(ft_[a-z_]+?)(?:_bucket)?\{.*?(\w+)="([^"~]+)"', query):
            labels = METRICS[name].labels
            assert label in labels, query
            assert not labels[label] or value in labels[label], query


def test_all_that_is_known_of_a_pair_is_on_the_dashboard() -> None:
    of_pairs = {"ft_lighthouse_role", "ft_lighthouse_contact", "ft_lighthouse_takeovers_total"}
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    titles = [panel["title"] for panel in panels if panel["type"] == "row"]
    begin = next(at for at, panel in enumerate(panels) if panel["title"] == "Two lighthouses")
    queries = " ".join(target["expr"] for panel in panels[begin:] for target in panel.get("targets", ()))
    assert titles[-1] == "Two lighthouses"
    assert set(NAME.findall(queries)) == of_pairs


def test_every_alert_says_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 10
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert len(rule["annotations"]["action"]) > 40, rule["alert"]
        assert rule["annotations"]["summary"].endswith(".")


def test_options_and_variables_that_alerts_name_exist() -> None:
    from ft_core.control.lighthouse.cli import _parser as lighthouse
    from ft_core.launch.argument_parser import parser
    from ft_core.settings import KNOWN_ENVIRONMENT

    told = " ".join(rule["annotations"]["action"] for rule in rules() if "alert" in rule)
    assert set(re.findall(r"\bFT_[A-Z_]+\b", told)) <= set(KNOWN_ENVIRONMENT)
    options = {name for one in (parser(), lighthouse()) for action in one._actions for name in action.option_strings}
    assert set(re.findall(r"--[a-z-]+", told)) <= options
    for page in re.findall(r"docs/[a-z-]+\.md", told):
        assert (MONITORING.parents[1] / page).exists()


def test_every_panel_says_where_it_reads_and_fits() -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.process
def test_promtool_finds_nothing_wrong() -> None:
    assert "SUCCESS" in promtool("check", "rules", "alerts.yml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


@pytest.mark.process
def test_alerts_fire_when_they_should_and_not_in_a_job_that_trains(tmp_path: pathlib.Path) -> None:
    everything = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for group in everything["groups"]:
        for rule in group["rules"]:
            rule.get("annotations", {}).pop("action", None)  # sentences without values: they would stand here twice
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(everything))
    shutil.copy(HERE / "alerts_test.yml", tmp_path)
    promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)
    cases = yaml.safe_load((HERE / "alerts_test.yml").read_text())["tests"]
    fired = {one["alertname"] for case in cases for one in case["alert_rule_test"] if one.get("exp_alerts")}
    silent = {one["alertname"] for one in cases[0]["alert_rule_test"]}
    assert fired == silent == {rule["alert"] for rule in rules() if "alert" in rule}
