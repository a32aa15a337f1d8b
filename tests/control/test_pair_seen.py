"""A pair of lighthouses as an operator sees it: status, dashboard, metrics, events, before a takeover and after it."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.control.lighthouse import room_samples
from ft_core.errors import LighthouseError
from ft_core.events.schema import PAIR_ROLES
from tests.control.recorder import wait_until
from tests.control.test_pair import Two, client
from tests.metrics.reading import gauge

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from ft_core.control.lighthouse.server import LighthouseServer


@pytest.fixture
def two(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(room_samples, "FRESH_S", 0.0)
    pair = Two(http="127.0.0.1:0", metrics="", events=str(tmp_path))
    yield pair
    pair.close()


def ask(server: LighthouseServer, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_address().removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def pair_of(server: LighthouseServer) -> Any:
    return json.loads(ask(server, "/status.json")[1])["pair"]


def metrics(server: LighthouseServer) -> str:
    assert server.metrics_page is not None
    return server.metrics_page.render()[0].decode()


def roles(server: LighthouseServer) -> list[str]:
    text = metrics(server)
    return [role for role in PAIR_ROLES if gauge(text, "ft_lighthouse_role", role=role) == 1]


def events(folder: pathlib.Path, server: LighthouseServer) -> list[dict[str, Any]]:
    """Those of this lighthouse about the pair."""
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")]
    mine = [log for log in found if any(e.get("address") == server.address() for e in log)]
    return [e for log in mine for e in log if e["kind"] == "pair"]


def test_the_one_that_stands_by_says_so_everywhere(two: Two, tmp_path: pathlib.Path) -> None:
    servers = two.begin(0), two.begin(1)
    index = two.settled()
    active, standby = servers[index], servers[1 - index]
    there = two.addresses[index]
    with pytest.raises(LighthouseError, match=f": standby: {there} is active; .* its records are complete$"):
        client(two.addresses[1 - index]).status()
    wait_until(lambda: pair_of(standby)["role"] == "standby")
    seen = pair_of(standby)
    assert (seen["other"], seen["contact"], seen["complete"], seen["took_over"]) == (there, True, True, False)
    assert seen["since_s"] < 60
    assert ask(standby, "/readyz") == (200, "ok: stands by for the other lighthouse\n"), "who asks it is sent on"
    wait_until(lambda: ask(active, "/readyz") == (200, "ok: active\n"))
    assert f"stands by for {there}" in seen["told"]
    assert ask(standby, "/healthz") == (200, "ok\n")
    wait_until(lambda: f"{two.addresses[1 - index]} stands by" in pair_of(active)["told"])
    assert roles(standby) == ["standby"]
    assert roles(active) == ["active"]
    assert gauge(metrics(active), "ft_lighthouse_contact") == gauge(metrics(standby), "ft_lighthouse_contact") == 1
    wait_until(lambda: [e["role"] for e in events(tmp_path, standby)][-1:] == ["standby"])
    assert not any(e["took_over"] for server in servers for e in events(tmp_path, server))


def test_a_takeover_is_counted_and_written_down_and_that_nobody_stands_by_is_said(
    two: Two, tmp_path: pathlib.Path
) -> None:
    servers = two.begin(0), two.begin(1)
    index = two.settled()
    standby, there = servers[1 - index], two.addresses[index]
    assert gauge(metrics(standby), "ft_lighthouse_takeovers_total") == 0
    two.end(index)
    wait_until(lambda: pair_of(standby)["alone"])
    seen = pair_of(standby)
    assert (seen["role"], seen["took_over"], seen["contact"], seen["complete"]) == ("active", True, False, True)
    assert f"Nobody stands by: {there} has been out of contact for" in seen["told"]
    assert roles(standby) == ["active"]
    assert gauge(metrics(standby), "ft_lighthouse_contact") == 0
    wait_until(lambda: gauge(metrics(standby), "ft_lighthouse_takeovers_total") == 1)
    wait_until(lambda: any(e["took_over"] for e in events(tmp_path, standby)))
    took = events(tmp_path, standby)[-1]
    assert {k: took[k] for k in ("role", "before", "other", "contact", "complete")} == {
        "role": "active", "before": "standby", "other": there, "contact": False, "complete": True,
    }  # fmt: skip
    two.begin(index)
    assert two.settled() == 1 - index
    wait_until(lambda: f"{there} stands by" in pair_of(standby)["told"])
    assert "since it took the place of" in pair_of(standby)["told"]
    wait_until(lambda: events(tmp_path, standby)[-1]["contact"])
    assert sum(e["took_over"] for e in events(tmp_path, standby)) == 1


def test_a_lighthouse_that_is_alone_says_nothing_of_a_pair(two: Two, tmp_path: pathlib.Path) -> None:
    server = two.begin(0, peer="")
    wait_until(lambda: ask(server, "/readyz") == (200, "ok\n"))
    assert pair_of(server) is None
    assert "ft_lighthouse_role{" not in metrics(server)
    assert "ft_lighthouse_contact " not in metrics(server)
    assert events(tmp_path, server) == []
