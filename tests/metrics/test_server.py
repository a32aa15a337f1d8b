"""A page on a port: what a scraper reads, one that reads slowly, ports in use, forks, and that nothing is left."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from ft_core.errors import ConfigError
from ft_core.events.schema import REPLICA
from ft_core.metrics import exposition, server
from ft_core.metrics.admission import Admission
from ft_core.metrics.metrics import Metrics
from ft_core.metrics.server import MetricsServer, metrics_address, open_page
from tests.metrics.reading import gauge, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 10.0
ANYBODY = Admission(trusts_all=True)


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics(REPLICA, {"replica": "replica-0"})
    metrics.emit("made", step=3, replica_id="x", ranks=1)
    return metrics


@pytest.fixture
def serve(metrics: Metrics) -> Iterator[Callable[..., MetricsServer]]:
    """Serves at an address, and ends it."""
    made: list[MetricsServer] = []

    def serve(
        address: str = "127.0.0.1:0", *, must_bind: bool = False, admission: Admission | None = None
    ) -> MetricsServer:
        page = open_page([metrics])
        assert page is not None
        made.append(MetricsServer(page, address, "replica-0", "FT_METRICS", admission))
        made[-1].start(must_bind=must_bind)
        return made[-1]

    yield serve
    for one in made:
        one.close()


def requests() -> list[threading.Thread]:
    """The threads of requests that are being answered."""
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def port_of(server: MetricsServer) -> int:
    assert server.bound.wait(WAIT_S)
    return int(server.url.removesuffix("/metrics").rpartition(":")[2])


def test_a_scraper_reads_what_is_so_now(metrics: Metrics, serve: Callable[..., MetricsServer]) -> None:
    url = f"http://127.0.0.1:{port_of(serve())}/metrics"
    assert gauge(read(url), "ft_step", replica="replica-0") == 3
    metrics.emit("made", step=4, replica_id="x", ranks=1)
    text = read(url)
    assert gauge(text, "ft_step", replica="replica-0") == 4
    assert "process_resident_memory_bytes" in text
    assert "python_info" not in text
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")


def test_what_is_counted_needs_nobody_who_looks(
    metrics: Metrics, serve: Callable[..., MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DRAIN_S", 0.01)
    serve("")
    metrics.emit("made", step=9, replica_id="x", ranks=1)
    until = time.monotonic() + WAIT_S
    while metrics._waiting and time.monotonic() < until:
        threading.Event().wait(0.005)
    assert not metrics._waiting


def test_scrapers_that_read_slowly_are_few_and_end(
    metrics: Metrics, serve: Callable[..., MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that send nothing, or take nothing: the limit holds, others are sent away, and time frees places."""
    monkeypatch.setattr(server, "REQUEST_S", 0.5)
    port = port_of(serve())
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(server.REQUESTS_MAX)]
        for one in slow[1:]:
            one.sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
        turned_away = False
        until = time.monotonic() + WAIT_S
        while not turned_away and time.monotonic() < until:
            try:
                read(f"http://127.0.0.1:{port}/metrics")
            except (urllib.error.URLError, ConnectionError):
                turned_away = True
        assert turned_away
        assert len(requests()) <= server.REQUESTS_MAX
        for one in slow:  # REQUEST_S later all are closed from that side
            one.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionError):
                while one.recv(1000):
                    pass
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            assert gauge(read(f"http://127.0.0.1:{port}/metrics"), "ft_step", replica="replica-0") == 3
            return
    raise AssertionError("no place became free")


def test_an_answer_that_is_never_taken_ends_and_nobody_else_waits(
    metrics: Metrics, serve: Callable[..., MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than fits into the sockets' buffers, to who reads nothing: emit is not slower, others are served."""
    monkeypatch.setattr(server, "REQUEST_S", 1.0)
    page = open_page([metrics])
    assert page is not None
    answers = [b"x" * (32 << 20), b"small"]

    def application(environ: object, start_response: Callable[..., object]) -> list[bytes]:
        answer = answers.pop(0)
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]

    monkeypatch.setattr(exposition.Page, "application", lambda _: application)
    port = port_of(serve())
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert slow.recv(10)
        began = time.thread_time()
        for _ in range(100):
            metrics.emit("pause_ended", reason="", seconds_s=0.0)
        assert time.thread_time() - began < 0.1
        assert read(f"http://127.0.0.1:{port}/metrics") == "small"
        until = time.monotonic() + WAIT_S
        while requests() and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert not requests(), "it was given up"


def test_who_sends_a_byte_now_and_then_is_ended_too(
    serve: Callable[..., MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No single wait of such a connection is long."""
    monkeypatch.setattr(server, "REQUEST_S", 0.5)
    monkeypatch.setattr(server, "DRAIN_S", 0.1)
    port = port_of(serve())
    with socket.create_connection(("127.0.0.1", port)) as slow:
        until = time.monotonic() + WAIT_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                slow.sendall(b"G")
                threading.Event().wait(0.05)
        assert time.monotonic() < until, "it was never ended"
    assert read(f"http://127.0.0.1:{port}/metrics")


def test_many_scrapers_wait_for_their_turn(
    serve: Callable[..., MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many are taken per second; the others are answered later, and nothing spins meanwhile."""
    monkeypatch.setattr(server, "ACCEPTS_MAX", 2)
    one = serve()
    port = port_of(one)
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(5):
        assert read(f"http://127.0.0.1:{port}/metrics")
    assert time.monotonic() - began > 0.9
    assert time.process_time() - cpu < 0.5
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 1.5, "its end waits for nobody's turn"


def test_without_free_descriptors_nothing_spins(
    serve: Callable[..., MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays in the queue, and the port readable."""
    failed: list[float] = []

    def accept(_: object) -> object:
        failed.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    port = port_of(serve())
    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(monkeypatch.context())
        patched.setattr("socket.socket.accept", accept)
        waits = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        waits.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        until = time.monotonic() + WAIT_S
        while (not failed or time.monotonic() < failed[0] + 1.5) and time.monotonic() < until:
            threading.Event().wait(0.05)
        assert 2 <= len(failed) <= 3 * server.ACCEPTS_MAX
        patched.undo()
        waits.settimeout(WAIT_S)
        assert waits.recv(15).startswith(b"HTTP/1.0 200")


def test_a_port_in_use_is_one_warning_and_served_when_it_is_free(
    metrics: Metrics, serve: Callable[..., MetricsServer], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(server, "RETRY_S", 0.01)
    monkeypatch.setattr(server, "PATIENCE_S", 0.05)
    with socket.socket() as other, caplog.at_level(logging.WARNING):
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        waits = serve(f"127.0.0.1:{port}")
        until = time.monotonic() + WAIT_S
        while not caplog.records and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert not waits.bound.wait(0.1)
    assert port_of(waits) == port
    assert read(waits.url)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"FT_METRICS=127.0.0.1:{port}" in warning.getMessage()
    assert "Address already in use" in warning.getMessage()
    assert "training goes on" in warning.getMessage()


def test_who_must_bind_is_told_what_to_do(serve: Callable[..., MetricsServer]) -> None:
    taken = port_of(serve())
    with pytest.raises(ConfigError, match=rf"FT_METRICS=127\.0\.0\.1:{taken}.*Address already in use.*port 0"):
        serve(f"127.0.0.1:{taken}", must_bind=True)
    with pytest.raises(ConfigError, match=r"FT_METRICS=203\.0\.113\.1:0: metrics cannot be served there"):
        serve("203.0.113.1:0", must_bind=True, admission=ANYBODY)
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        serve("no.such.host.invalid:0", must_bind=True, admission=ANYBODY)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9300", ("127.0.0.1", 9300)), (":9300", ("", 9300)), ("[::1]:0", ("::1", 0)),
        ("http://a:9300/metrics", ("a", 9300)),
    ],
)  # fmt: skip
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert metrics_address(text, "FT_METRICS") == address


@pytest.mark.parametrize("text", ["9300", "a:b", "a:70000", "::1:9300", "a:", "a:-1", "a:9300/x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics='.*': expected HOST:PORT"):
        metrics_address(text, "--metrics")


def test_all_addresses_and_ipv6(serve: Callable[..., MetricsServer]) -> None:
    everywhere = serve(":0", admission=ANYBODY)
    port = port_of(everywhere)
    assert everywhere.url == f"http://0.0.0.0:{port}/metrics"
    assert read(f"http://127.0.0.1:{port}/metrics")
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    six = serve("[::1]:0")
    assert read(f"http://[::1]:{port_of(six)}/metrics")


def test_closing_while_somebody_reads_slowly_leaves_nothing(serve: Callable[..., MetricsServer]) -> None:
    one = serve()
    port = port_of(one)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET")
        until = time.monotonic() + WAIT_S
        while not requests() and time.monotonic() < until:
            threading.Event().wait(0.005)
        one.close()
        one.close()
        slow.settimeout(WAIT_S)
        assert slow.recv(10) == b""
    assert not one._thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.forks
def test_a_forked_child_lets_go_of_the_port(serve: Callable[..., MetricsServer]) -> None:
    """A DataLoader worker that outlives its trainer would keep the next one from its port."""
    one = serve()
    port = port_of(one)
    reads, writes = os.pipe()
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.write(begins, b"x")
        os.read(reads, 1)
        os._exit(0)
    os.close(reads)
    try:
        assert os.read(begun, 1), "what happens in a child at its begin has happened"
        one.close()
        again = serve(f"127.0.0.1:{port}", must_bind=True)
        assert read(again.url)
    finally:
        for descriptor in (writes, begun, begins):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_without_the_library_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "missing", lambda: exposition.MISSING)
    monkeypatch.setattr(server, "_told", False)
    with caplog.at_level(logging.WARNING):
        assert open_page([]) is None
        assert open_page([]) is None
    assert [record.getMessage() for record in caplog.records] == [exposition.MISSING]
    assert "pip install 'ft-training[metrics]'" in exposition.MISSING
