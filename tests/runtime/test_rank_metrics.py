"""The metrics of a rank: what a Manager that trains serves, and that an address it cannot have costs it nothing."""

from __future__ import annotations

import logging
import socket
import time
import urllib.error
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.errors import ConfigError
from ft_core.metrics import exposition, server
from ft_core.metrics.admission import Admission
from ft_core.runtime import rank_metrics
from ft_core.runtime.rank_metrics import VARIABLE, open_metrics, process_began
from tests.metrics.reading import read, samples
from tests.runtime.harness import Cluster, Replica

if TYPE_CHECKING:
    from ft_core.metrics.metrics import Metrics
    from tests.held_ports import Hold


IMPORTED_AT = time.time()
WAIT_S = 20.0


def opened(last_ack: float = float("-inf"), **changed: Any) -> Metrics | None:
    given = {"metrics": "127.0.0.1:0", "rank": 0, "started_at": None, "name": "a", "admission": Admission()} | changed
    config: Any = SimpleNamespace(**given)
    return open_metrics(config, lambda: last_ack)


def value(metrics: Metrics, name: str) -> float | None:
    (family,) = [family for family in metrics.families() if family.name == name]
    found = family.values.get(())
    assert found is None or isinstance(found, float)
    return found


@pytest.mark.timeout(60)
def test_replicas_that_train_serve_what_they_do_and_a_port_in_use_costs_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    """Two Managers in one process want the same port: one has it; somebody who reads nothing is connected to it."""
    (port,) = hold()
    monkeypatch.setenv(VARIABLE, f"127.0.0.1:{port}")
    pages: list[str] = []
    silent: list[socket.socket] = []

    def look(_: Replica) -> None:
        until = time.monotonic() + WAIT_S
        while not pages:
            try:
                pages.append(read(f"http://127.0.0.1:{port}/metrics"))
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < until, "nothing is served"
        silent.append(socket.create_connection(("127.0.0.1", port)))

    try:
        cluster.run(Replica(0, at={(3, "boundary"): look}), Replica(1))
    finally:
        for one in silent:
            one.close()
    cluster.check(steps=6)
    found = samples(pages[0])
    (served,) = {dict(labels)["replica"] for name, labels in found if name == "ft_step"}
    here = ("replica", served)
    assert served.partition(":")[0] in ("r0", "r1")
    assert found["ft_quorum_changes_total", frozenset({here, ("reason", "first")})] == 1
    assert found["ft_members", frozenset({here})] == 2
    assert found["ft_commits_total", frozenset({here})] >= 1
    assert found["ft_state", frozenset({here, ("state", "training")})] == 1
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_an_address_that_is_none_is_an_error_where_the_manager_is_made(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "9300")
    replica = Replica(0)
    cluster.start(replica)
    replica.thread.join(WAIT_S)
    assert isinstance(replica.error, ConfigError)
    assert str(replica.error).startswith("FT_METRICS='9300': expected HOST:PORT")
    replica.error = None


def test_other_machines_reach_it_with_a_token_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in ftrun's workers, whose token may be one that nobody else has."""
    for name, value in {VARIABLE: "0.0.0.0:0", "FT_TOKEN": "made", "FT_MADE_TOKEN": "1"}.items():
        monkeypatch.setenv(name, value)
    replica = Replica(0)
    cluster.start(replica)
    replica.thread.join(WAIT_S)
    assert isinstance(replica.error, ConfigError)
    assert str(replica.error).startswith("FT_METRICS=0.0.0.0:0 without FT_TOKEN: whoever reaches this address may read")
    replica.error = None


def test_how_old_the_lease_is_and_none_before_there_is_one() -> None:
    for age_s, shown in ((5.0, True), (float("inf"), False)):
        metrics = opened(time.monotonic() - age_s)
        assert metrics is not None
        try:
            age = value(metrics, "ft_lease_age_seconds")
            assert (age is not None and 5.0 <= age < 60.0) == shown
        finally:
            metrics.close()


def test_who_serves_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert opened(metrics="") is None
    assert opened(rank=1) is None, "its rank 0 does"
    monkeypatch.setattr(server, "missing", lambda: exposition.MISSING)
    monkeypatch.setattr(server, "_told", False)
    with caplog.at_level(logging.WARNING):
        assert opened() is None
    assert [record.getMessage() for record in caplog.records] == [exposition.MISSING]


def test_the_time_before_the_first_commit_begins_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert IMPORTED_AT - 86_400 < process_began() < IMPORTED_AT
    monkeypatch.setattr(rank_metrics, "_began_before", False)
    born = []
    for started_at in (1234.5, 1234.5):
        metrics = opened(started_at=started_at)
        assert metrics is not None
        born.append(metrics._known.born)
        metrics.close()
    assert born[0] == 1234.5, "ftrun gave it its work then"
    assert born[1] > IMPORTED_AT, "a second Manager of the process"
