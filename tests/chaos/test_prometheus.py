"""A real Prometheus scrapes a real job of ftrun that loses a replica to kill -9, and knows of it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import pathlib
import re
import signal
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.control.lighthouse.server import LighthouseServer
from tests.certificates import Authority, environment
from tests.launch.job import job
from tests.metrics.prometheus import MONITORING, Prometheus, binary, prometheus, promtool
from tests.metrics.reading import read

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.held_ports import Hold


pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUPS = ("replica-0", "replica-1", "replica-2")


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[int], None]:
    """Lets all workers train to a step and end there."""
    path = tmp_path / "steps"
    surroundings = {"STEPS_FILE": str(path), "STEP_MS": "20", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)

    def end(step: int) -> None:
        partial = path.with_suffix(".tmp")
        partial.write_text(str(step))
        partial.rename(path)

    return end


def test_a_kill_is_seen_in_what_prometheus_knows(
    end: Callable[[int], None], tmp_path: pathlib.Path, forged_workers: None, hold: Hold
) -> None:
    binary("prometheus")
    port = hold(5, in_row=True)[0]
    pages = [f"127.0.0.1:{port + number}" for number in range(4)]
    with prometheus(tmp_path, port + 4, {"ftrun": pages[:1], "ft-replica": pages[1:]}) as found, job(
        ROOT / "tests/chaos/worker.py", "--replicas", "3", "--events", "off", "--metrics", pages[0]
    ) as running:  # fmt: skip
        pids: dict[str, int] = {}

        def started(line: re.Match[str]) -> None:
            pids["replica-1"] = int(line[1])

        def kill(_: re.Match[str]) -> None:
            found.wait("count(ft_commits_total > 60) == 3 and on () sum(ft_lighthouse_members) == 3")
            os.kill(pids["replica-1"], signal.SIGKILL)

        def look(_: re.Match[str]) -> None:
            try:
                check_what_is_known(found)
                check_pages([f"http://{page}/metrics" for page in pages])
                check_dashboard(found)
            finally:
                end(int(found.value("max(ft_step)")) + 100)  # it is a second old

        running.when(r"\[replica-1\] started \(pid (\d+)\)", started)
        running.when(r"\] commit \d+ 3", kill)
        running.when(r"\] commit \d+ 3", look, after=[r"\[replica-1\] rank 0 .* was ended by SIGKILL",
                                                      r"\[replica-1\] started"])  # fmt: skip
        assert running.run() == 0, running.text
        assert (
            running.count(f"metrics at http://{pages[0]}/metrics, those of group N at 127.0.0.1:{port + 1} \\+ N") == 1
        )


def test_what_other_machines_read_takes_the_token_and_the_jobs_certificates(
    end: Callable[[int], None],
    tmp_path: pathlib.Path,
    forged_workers: None,
    monkeypatch: pytest.MonkeyPatch,
    hold: Hold,
) -> None:
    """Prometheus as docs/metrics.md configures it, and who has only one of the two."""
    binary("prometheus")
    tls = Authority().files(tmp_path / "tls")
    surroundings = {"FT_TOKEN": "job-secret", **environment(tls)}
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    port = hold(4, in_row=True)[0]
    pages = [f"127.0.0.1:{port + number}" for number in range(3)]
    (tmp_path / "token").write_text("job-secret\n")
    sends = {
        "authorization": {"credentials_file": str(tmp_path / "token")}, "scheme": "https",
        "tls_config": {"ca_file": tls.ca, "cert_file": tls.cert, "key_file": tls.key},
    }  # fmt: skip
    targets = {"ftrun": pages[:1], "ft-replica": pages[1:]}
    with prometheus(tmp_path, port + 3, targets, sends) as found, job(
        ROOT / "tests/chaos/worker.py", "--replicas", "2", "--events", "off", "--metrics", f"0.0.0.0:{port}",
        env=surroundings,
    ) as running:  # fmt: skip

        def look(_: re.Match[str]) -> None:
            try:
                found.wait("sum(up) == 3 and on () count(ft_commits_total > 0) == 2")
                context = ssl.create_default_context(cafile=tls.ca)
                context.load_cert_chain(tls.cert, tls.key)
                for page in pages:
                    with pytest.raises(urllib.error.HTTPError) as caught:
                        urllib.request.urlopen(f"https://{page}/metrics", timeout=20, context=context)
                    assert caught.value.code == 401
                    caught.value.close()
                    with pytest.raises((OSError, http.client.HTTPException)):
                        read(f"http://{page}/metrics")
            finally:
                end(int(found.value("max(ft_step)")) + 100)

        running.when(r"\] commit \d+ 2", look)
        assert running.run() == 0, running.text
        assert running.count(f"metrics at https://0.0.0.0:{port}/metrics") == 1


def check_what_is_known(found: Prometheus) -> None:
    """After the kill and the restart, in Prometheus' own words."""
    found.wait('ft_ftrun_restarts_total{group="replica-1"} == 1')
    found.wait('ft_lighthouse_quorum_changes_total{reason="member joined"} >= 1')
    found.wait('ft_heals_total{replica="replica-1",outcome="ok"} >= 1')
    found.wait('ft_heal_bytes_total{replica="replica-1"} > 0')
    before = {labels["replica"]: value for labels, value in found.query("ft_commits_total")}
    assert sorted(before) == list(GROUPS)
    for replica, commits in before.items():
        found.wait(f'ft_commits_total{{replica="{replica}"}} > {commits}')
    found.wait("count(ft_members == 3) == 3 and on () sum(ft_lighthouse_members) == 3")
    assert found.value('ft_lighthouse_quorum_changes_total{reason="first"}') == 1
    assert found.value('ft_lighthouse_quorum_changes_total{reason="member lost"}') == 1
    assert found.value("sum(ft_lighthouse_members_lost_total)") == 1
    for survivor in ("replica-0", "replica-2"):
        here = f'{{replica="{survivor}",cause="member lost"}}'
        assert found.value(f"ft_gap_seconds_count{here}") == 1
        # 0 where usual steps take as long, as on a machine that is busy.
        assert 0 <= found.value(f"ft_gap_seconds_sum{here}") < 5
        assert found.value(f'ft_gap_seconds_bucket{{replica="{survivor}",cause="member lost",le="+Inf"}}') == 1
        assert found.value(f"ft_lost_seconds_total{here}") == found.value(f"ft_gap_seconds_sum{here}")
        assert found.value(f'ft_quorum_changes_total{{replica="{survivor}",reason="member lost"}}') == 1
    assert found.value('ft_ftrun_failures_total{group="replica-1",cause="signal"}') == 1
    assert found.value('ft_ftrun_restarts_total{group="replica-0"}') == 0
    assert found.value('ft_ftrun_down_seconds_total{group="replica-1"}') > 0
    assert found.value('ft_lost_seconds_total{replica="replica-1",cause="start"}') > 0
    ages = {labels["replica"]: value for labels, value in found.query("ft_lighthouse_lease_age_seconds")}
    assert sorted(ages) == list(GROUPS)
    assert max(ages.values()) < 30
    for ratio in found.query("ft_goodput_ratio"):
        assert 0 < ratio[1] <= 1
    found.wait("count(ft_vote_seconds_count > 10) == 3")
    assert {labels["state"] for labels, value in found.query("ft_state == 1") if labels["replica"] == "replica-0"} == {
        "training"
    }
    assert found.value("max(time() - ft_last_commit_timestamp_seconds)") < 30
    assert found.value("sum(ft_vetoes_total)") == found.value('sum(ft_vetoes_total{cause!="states differ"})')


def check_pages(urls: list[str]) -> None:
    """promtool finds nothing wrong in what is really served."""
    for url in urls:
        assert promtool("check", "metrics", text=read(url)) == ""


def panels(row: str | None = None) -> list[dict[str, Any]]:
    """Of the dashboard, or of one of its rows."""
    found: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for panel in json.loads((MONITORING / "grafana.json").read_text())["panels"]:
        title = panel["title"] if panel["type"] == "row" else title
        found.setdefault(title, []).append(panel)
    return [*itertools.chain(*found.values())] if row is None else found[row]


def without_answer(found: Prometheus, shown: list[dict[str, Any]]) -> list[str]:
    """Titles of the panels one of whose queries finds nothing. Every query is one."""
    queries = [(panel["title"], target["expr"]) for panel in shown for target in panel.get("targets", ())]
    return [
        title for title, query in queries
        if not found.query(query.replace("$__rate_interval", "10s").replace("$__range", "1m"))
    ]  # fmt: skip


def check_dashboard(found: Prometheus) -> None:
    """All panels about a job with one lighthouse have an answer; so have the rules."""
    assert without_answer(found, panels()) == ["What each lighthouse does", "Stands by"]
    assert [rule["name"] for rule in found.rules() if rule["health"] != "ok"] == []


def test_of_two_lighthouses_it_is_seen_who_serves_and_who_took_over(tmp_path: pathlib.Path, hold: Hold) -> None:
    binary("prometheus")
    *ports, first, second, port = hold(5)
    pages = [f"127.0.0.1:{first}", f"127.0.0.1:{second}"]
    addresses = [f"127.0.0.1:{one}" for one in ports]
    shown = panels("Two lighthouses")
    with contextlib.ExitStack() as stack:
        servers = [
            LighthouseServer(addresses[mine], peer=addresses[1 - mine], token="", metrics=pages[mine])
            for mine in range(2)
        ]
        for server in servers:
            stack.callback(server.shutdown)
        found = stack.enter_context(prometheus(tmp_path, port, {"ft-lighthouse": pages}))
        found.wait('sum(ft_lighthouse_role{role="active"}) == 1 and on () min(ft_lighthouse_contact) == 1')
        found.wait("count(rate(ft_lighthouse_takeovers_total[10s])) == 2")
        assert without_answer(found, shown) == []
        ((serves, _),) = found.query('ft_lighthouse_role{role="active"} == 1')
        servers[pages.index(serves["instance"])].shutdown()
        found.wait("min(ft_lighthouse_contact) == 0")
        found.wait("sum(changes(ft_lighthouse_takeovers_total[30s])) > 0")
        assert without_answer(found, shown) == []
