"""Who may read metrics at an address that other machines reach: with a token, with certificates, with neither."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.access import Tokens
from ft_core.certificates import Tls
from ft_core.errors import ConfigError
from ft_core.events.schema import REPLICA
from ft_core.metrics import server
from ft_core.metrics.admission import Admission
from ft_core.metrics.metrics import Metrics
from ft_core.metrics.server import MetricsServer, open_page
from tests.certificates import Authority, alone, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 10.0
EVERYWHERE = "0.0.0.0:0"
WATCHERS = "ft-certificates"


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Serves a page at an address. Returns the port."""
    made: list[MetricsServer] = []

    def serve(admission: Admission, address: str = EVERYWHERE) -> int:
        metrics = Metrics(REPLICA, {"replica": "replica-0"})
        page = open_page([metrics])
        assert page is not None
        one = MetricsServer(page, address, "replica-0", "FT_METRICS", admission)
        made.append(one)
        one.start(must_bind=True)
        return int(one.url.removesuffix("/metrics").rpartition(":")[2])

    yield serve
    for one in made:
        one.close()
    assert no_watcher()


def no_watcher() -> bool:
    """The thread that looks at certificates has ended, or does so now."""
    for thread in threading.enumerate():
        if thread.name == WATCHERS:
            thread.join(WAIT_S)
    return all(thread.name != WATCHERS for thread in threading.enumerate())


def ask(port: int, *headers: str, context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and body of what is answered to these Authorization headers."""
    connection = (
        http.client.HTTPConnection(host, port, timeout=WAIT_S)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=WAIT_S, context=context)
    )
    with contextlib.closing(connection):
        connection.putrequest("GET", "/metrics")
        for header in headers:
            connection.putheader("Authorization", header)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def client(tls: Tls) -> ssl.SSLContext:
    """As Prometheus has it: ca_file, cert_file and key_file."""
    context = ssl.create_default_context(cafile=tls.ca or tls.cert)
    if tls.key:
        context.load_cert_chain(tls.cert, tls.key)
    return context


@pytest.mark.parametrize("address", ["0.0.0.0:0", ":0", "[::]:0"])
def test_other_machines_need_the_token(serve: Callable[..., int], address: str) -> None:
    if address.startswith("[") and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    port = serve(Admission(Tokens("job", "chief")), address)
    host = "::1" if address.startswith("[") else "127.0.0.1"
    for given in ((), ("Bearer",), ("Bearer ",), ("Bearer jo",), ("Bearer jobs",), ("Basic job",), ("job",),
                  ("Bearer j\xf6b",), ("Bearer job", "Bearer job"), ("Bearer " + "x" * 10_000,)):  # fmt: skip
        status, text = ask(port, *given, host=host)
        assert status == 401, given
        assert "FT_TOKEN" in text
        assert "ft_step" not in text
        assert "process_" not in text
    for given in (("Bearer job",), ("bearer job",), ("Bearer  job ",), ("Bearer chief",)):
        status, text = ask(port, *given, host=host)
        assert (status, "ft_commits_total" in text) == (200, True), given


def test_this_machine_needs_none(serve: Callable[..., int], tmp_path: Path) -> None:
    """Also where the job has a token and certificates: nothing but this machine's own processes get there."""
    tls = Authority().files(tmp_path)
    for address in ("127.0.0.1:0", "localhost:0"):
        assert ask(serve(Admission(Tokens("job"), tls), address))[0] == 200


def test_without_anything_nobody_may_listen_there(tmp_path: Path) -> None:
    page = open_page([])
    assert page is not None
    one_sided = write(tmp_path / "alone", alone().pem, alone().key_pem())
    for admission in (None, Admission(), Admission(Tokens("", "chief")), Admission(tls=one_sided),
                      Admission(tls=Tls(ca="ca.pem"))):  # fmt: skip
        for address in ("0.0.0.0:9300", ":9300", "[::]:0", "10.1.2.3:9300", "trainer0:9300"):
            with pytest.raises(ConfigError, match=r"FT_METRICS=\S+ without FT_TOKEN: .*Set FT_TOKEN .*FT_INSECURE=1"):
                MetricsServer(page, address, "replica-0", "FT_METRICS", admission)


def test_everybody_may_where_that_is_meant_so(serve: Callable[..., int]) -> None:
    assert ask(serve(Admission(trusts_all=True)))[0] == 200


def test_a_token_never_travels_in_clear_where_there_are_certificates(serve: Callable[..., int], tmp_path: Path) -> None:
    tls, stranger = Authority().files(tmp_path / "job"), Authority("else").files(tmp_path / "else")
    port = serve(Admission(Tokens("job"), tls))
    assert ask(port, "Bearer job", context=client(tls))[0] == 200
    assert ask(port, context=client(tls))[0] == 401, "with a CA both are needed"
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(port, "Bearer job")
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(port, "Bearer job", context=client(stranger))
    nobody = ssl.create_default_context(cafile=tls.ca)
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        ask(port, "Bearer job", context=nobody)


def test_a_certificate_alone_is_enough_where_clients_have_to_show_one(
    serve: Callable[..., int], tmp_path: Path
) -> None:
    tls = Authority().files(tmp_path)
    assert ask(serve(Admission(tls=tls)), context=client(tls))[0] == 200


def test_replaced_certificates_are_used_and_broken_ones_are_not(
    serve: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_core.certificates.LOOK_S", 0.02)
    old, new = Authority("old"), Authority("new")
    both, first, second = old.own.pem + new.own.pem, old.sign(), new.sign()
    tls = write(tmp_path / "files", first.pem, first.key_pem(), both)
    mine = old.files(tmp_path / "old"), new.files(tmp_path / "new")
    port = serve(Admission(tls=tls))
    assert ask(port, context=client(mine[0]))[0] == 200
    write(tmp_path / "files", first.pem[:200], first.key_pem(), both)
    assert ask(port, context=client(mine[0]))[0] == 200
    write(tmp_path / "files", second.pem, second.key_pem(), both)
    until = time.monotonic() + WAIT_S
    while True:
        try:
            assert ask(port, context=client(mine[1]))[0] == 200
            break
        except ssl.SSLCertVerificationError:
            assert time.monotonic() < until, "the new certificate is never shown"


def test_half_a_handshake_keeps_nobody_out_for_long(
    serve: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent, cut off in the middle, a byte now and then, and gone at once."""
    monkeypatch.setattr(server, "REQUEST_S", 0.5)
    monkeypatch.setattr(server, "DRAIN_S", 0.1)
    tls = Authority().files(tmp_path)
    port = serve(Admission(tls=tls))
    with contextlib.ExitStack() as stack:
        half = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
        half[1].sendall(b"\x16\x03\x01\x02\x00\x01")
        half[2].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        half[3].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        half[3].close()
        until = time.monotonic() + WAIT_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                half[1].sendall(b"\0")  # no single wait for it is long
                threading.Event().wait(0.05)
        assert time.monotonic() < until, "it was never ended"
        half[0].settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            assert half[0].recv(100) == b""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert ask(port, context=client(tls))[0] == 200
            return
    raise AssertionError("no place became free")


def test_closing_during_a_handshake_leaves_nothing(tmp_path: Path) -> None:
    page = open_page([])
    assert page is not None
    before = set(os.listdir("/proc/self/fd"))
    tls = Authority().files(tmp_path)
    one = MetricsServer(page, EVERYWHERE, "replica-0", "FT_METRICS", Admission(tls=tls))
    one.start(must_bind=True)
    port = int(one.url.removesuffix("/metrics").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"\x16\x03\x01")
        until = time.monotonic() + WAIT_S
        while not requests() and time.monotonic() < until:
            threading.Event().wait(0.005)
        assert requests()
        one.close()
        half.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            assert half.recv(10) == b""
        while requests() and time.monotonic() < until:
            threading.Event().wait(0.005)
    assert not requests()
    assert no_watcher()
    assert set(os.listdir("/proc/self/fd")) <= before


def requests() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
