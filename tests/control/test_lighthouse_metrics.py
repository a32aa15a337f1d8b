"""The lighthouse's metrics: from real leases, at a real port, without waiting for its loop; and its command line."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.control.lighthouse import room_samples
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError
from ft_core.lighthouse import main
from ft_core.metrics import exposition
from ft_core.metrics import server as metrics_server
from tests.control.recorder import wait_until
from tests.metrics.reading import gauge, read, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.control.recorder import Replica
    from tests.held_ports import Hold


HERE = "127.0.0.1:0"


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    """One whose metrics are counted, and served nowhere."""
    server = LighthouseServer(HERE, boot_window_ms=20, token="", metrics="")
    yield server
    server.shutdown()


def page(server: LighthouseServer) -> str:
    assert server.metrics_page is not None
    body, content_type = server.metrics_page.render()
    assert content_type.startswith("text/plain")
    return body.decode()


def test_leases_quorums_and_losses(
    lighthouse: LighthouseServer, trio: list[Replica], replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_samples, "FRESH_S", 0.0)
    text = page(lighthouse)
    where = {"room": "default"}
    assert gauge(text, "ft_lighthouse_members", **where) == 3
    assert gauge(text, "ft_lighthouse_replicas", **where) == 3
    assert gauge(text, "ft_lighthouse_waiting", **where) == 0
    assert gauge(text, "ft_lighthouse_quorum_changes_total", reason="first", **where) == 1
    assert gauge(text, "ft_lighthouse_leases_opened_total", **where) == 3
    ages = {
        dict(labels)["replica"]: value
        for (metric, labels), value in samples(text).items() if metric == "ft_lighthouse_lease_age_seconds"
    }  # fmt: skip
    assert sorted(ages) == ["a", "b", "c"]
    assert all(0 <= age < 60 for age in ages.values())
    trio[2].lease.leave(
        reason="done", finished=False, version=trio[2].recorder.presented.version, agreed=True, timeout_s=5
    )
    trio[1].ask(step=4)
    wait_until(lambda: gauge(page(lighthouse), "ft_lighthouse_waiting", **where) == 1)
    trio[0].ask(step=4)
    trio[0].answer()
    text = page(lighthouse)
    assert gauge(text, "ft_lighthouse_quorum_changes_total", reason="member left", **where) == 1
    assert gauge(text, "ft_lighthouse_goodbyes_total", **where) == 1
    assert gauge(text, "ft_lighthouse_members", **where) == 2
    assert 'replica="c"' not in text, "who has gone has no lease, and no age"


def test_it_is_served_and_a_port_in_use_names_the_option(capsys: pytest.CaptureFixture[str], hold: Hold) -> None:
    (port,) = hold()
    server = LighthouseServer(HERE, boot_window_ms=20, token="", metrics=f"127.0.0.1:{port}")
    try:
        assert gauge(read(f"http://127.0.0.1:{port}/metrics"), "ft_lighthouse_start_timestamp_seconds") > 1e9
        with pytest.raises(ConfigError, match=rf"metrics=127\.0\.0\.1:{port}.*Address already in use"):
            LighthouseServer(HERE, token="", metrics=f"127.0.0.1:{port}")
        assert main(["--bind", HERE, "--metrics", f"127.0.0.1:{port}"]) == 2
        told = capsys.readouterr().err
        assert f"ft-lighthouse: --metrics 127.0.0.1:{port}: metrics cannot be served there: Address already" in told
        assert main(["--bind", HERE, "--metrics", "9300"]) == 2
        assert "ft-lighthouse: --metrics '9300': expected HOST:PORT" in capsys.readouterr().err
    finally:
        server.shutdown()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_an_address_of_its_own_that_is_taken_leaves_no_metrics_behind(lighthouse: LighthouseServer, hold: Hold) -> None:
    port, taken = hold()[0], lighthouse.address().removeprefix("http://")
    with pytest.raises(ConfigError, match="cannot be bound"):
        LighthouseServer(taken, token="", metrics=f"127.0.0.1:{port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()


def test_without_the_library_it_is_a_lighthouse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_server, "missing", lambda: exposition.MISSING)
    monkeypatch.setattr(metrics_server, "_told", False)
    server = LighthouseServer(HERE, token="", metrics="127.0.0.1:1")
    try:
        assert server.metrics_page is None
        assert [record.getMessage() for record in caplog.records] == [exposition.MISSING]
    finally:
        server.shutdown()


def test_nothing_is_counted_that_nobody_wants() -> None:
    server = LighthouseServer(HERE, token="")
    try:
        assert server.metrics is None
        assert server.metrics_page is None
        assert not any("metrics" in thread.name for thread in threading.enumerate())
    finally:
        server.shutdown()


def test_a_busy_loop_is_not_waited_for_and_looked_at_once(
    lighthouse: LighthouseServer, trio: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    real = room_samples._of

    def counted(shell: Any) -> Any:
        taken.append(threading.current_thread().name)
        return real(shell)

    monkeypatch.setattr(room_samples, "_of", counted)
    for _ in range(20):
        assert gauge(page(lighthouse), "ft_lighthouse_members", room="default") == 3
    assert set(taken) == {"ft-lighthouse"}, "on the loop only"
    assert len(taken) <= 5, "one picture in FRESH_S"
    monkeypatch.setattr(room_samples, "FRESH_S", 0.0)
    monkeypatch.setattr(room_samples, "PATIENCE_S", 0.05)
    free, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        free.wait(10)

    lighthouse._server.post(stand)
    assert stands.wait(10)
    try:
        began = time.monotonic()
        assert gauge(page(lighthouse), "ft_lighthouse_members", room="default") == 3, "the last picture"
        assert time.monotonic() - began < 5
    finally:
        free.set()
    on_loop = lighthouse._server.call(lambda: page(lighthouse), 10)
    assert gauge(on_loop, "ft_lighthouse_members", room="default") == 3, "also who serves on that loop may ask"
    lighthouse.shutdown()
    assert gauge(page(lighthouse), "ft_lighthouse_members", room="default") == 3, "after its end: the last picture"
