"""A real lighthouse with its dashboard, asked over real sockets: paths, events, orders, slow and many readers."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509

from ft_core.control.lighthouse.dashboards import AUTO, PORT
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.dashboard import server as dashboards
from ft_core.dashboard import web_app
from ft_core.dashboard.feed import READERS_MAX
from ft_core.errors import ConfigError
from ft_core.protocol.types import Version
from tests.certificates import Authority
from tests.control.recorder import wait_until

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from tests.dashboard.here import Here

ORDER = {"X-FT-Dashboard": "1", "Content-Type": "application/json", "Authorization": "Bearer admin"}
PAGE_BYTES = 100_000


def members(here: Here) -> list[str]:
    return [one["id"] for one in here.room()["replicas"] if one["member"]]


# ---------------------------------------------------------------- looking


def test_status_names_the_members_and_who_was_lost(here: Here) -> None:
    one, two = here.quorum("a:1", "b:1")
    wait_until(lambda: members(here) == ["a:1", "b:1"])
    status = here.status()
    assert status["silent_s"] < 2
    (room,) = status["rooms"]
    assert (room["room"], room["quorum_size"], room["why"]) == ("default", 2, "")
    assert 0 <= room["replicas"][0]["lease_s"] < 2
    two.close()
    one.recorder.wait("member_lost")
    wait_until(lambda: here.room()["replicas"][1]["state"] == "lost")
    assert "lost b:1: its connection ended" in here.room()["story"][0]["text"]
    one.ask(step=1, failed=True)
    one.answer()
    wait_until(lambda: members(here) == ["a:1"])
    newest, before = here.room()["quorums"]
    assert newest["without"] == ["b:1"]
    assert before["reason"].startswith("lost b:1: its connection ended")


def test_why_there_is_no_quorum_is_said(here: Here) -> None:
    here.replica("a:1", expected=2).ask()
    wait_until(lambda: "waiting for" in here.room()["why"])
    assert here.room()["quorum"] == ""


def test_a_replica_reports_how_far_its_heal_is(here: Here) -> None:
    one = here.replica("a:1")
    one.lease.settings = replace(one.lease.settings, healed=lambda: (30, 100))
    wait_until(lambda: any(heal["total"] == 100 for heal in here.room()["heals"]))
    (heal,) = here.room()["heals"]
    assert (heal["id"], heal["bytes"], heal["ended_at"]) == ("a:1", 30, 0)
    assert here.room()["replicas"][0]["state"] == "healing"


def test_health_and_readiness(here: Here) -> None:
    wait_until(lambda: here.ask("/readyz")[:2] == (200, "ok\n"))
    assert here.ask("/healthz")[:2] == (200, "ok\n")


def test_a_lighthouse_that_does_not_answer_is_ill(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards, "ILL_S", 1.0)
    monkeypatch.setattr(dashboards, "ANSWER_S", 0.1)
    wait_until(lambda: here.ask("/readyz")[0] == 200)
    go_on = threading.Event()
    here.server._server.post(lambda: go_on.wait(20))
    try:
        wait_until(lambda: here.ask("/healthz")[0] == 503)
        assert "the lighthouse has not answered for" in here.ask("/healthz")[1]
        wait_until(lambda: here.status()["silent_s"] > 1)
    finally:
        go_on.set()
    wait_until(lambda: here.ask("/healthz")[0] == 200)


def test_the_page_is_small_and_asks_nobody_else(here: Here) -> None:
    total = 0
    for path in web_app.FILES:
        status, text, headers = here.ask(path)
        assert status == 200
        total += len(text.encode())
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        addresses = text.replace("http://www.w3.org/2000/svg", "")
        assert "://" not in addresses, f"{path} names another host: the page has to work offline"
    assert total <= PAGE_BYTES


def test_what_is_not_there_is_said_in_a_line(here: Here) -> None:
    assert here.ask("/nowhere")[:2] == (404, "404 Not Found\n")
    assert here.ask("/../secrets")[0] == 404
    status, _, headers = here.ask("/kill")
    assert (status, headers["Allow"]) == (405, "POST")


def test_a_foreign_host_is_refused_everywhere(here: Here) -> None:
    for path in (*web_app.FILES, "/events", "/status.json", "/healthz", "/readyz"):
        status, text, _ = here.ask(path, headers={"Host": "evil.example"})
        assert status == 403
        assert "localhost" in text


def test_other_machines_need_a_token_to_look(start: Callable[..., Here]) -> None:
    here = start(http="0.0.0.0:0")
    here.host = "127.0.0.1"
    for path in ("/status.json", "/events"):
        status, text, headers = here.ask(path)
        assert (status, headers["WWW-Authenticate"][:6]) == (401, "Bearer")
        assert "FT_TOKEN" in text
    assert here.ask("/", headers={"Host": "trainer0"})[0] == 200, "the page itself says nothing of the job"
    assert here.ask("/status.json", headers={"Authorization": "Bearer job", "Host": "trainer0"})[0] == 200


# ---------------------------------------------------------------- events


def read_events(client: socket.socket) -> Iterator[tuple[str, Any]]:
    """The events that arrive, as (kind, value)."""
    kind = ""
    with client.makefile("rb") as text:
        for line in text:
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield kind, json.loads(line[6:])


def test_events_are_live(here: Here) -> None:
    one, two = here.quorum("a:1", "b:1")
    with here.watch() as client:
        events = read_events(client)
        assert next(events)[0] == "page"
        began = time.monotonic()
        for renewing in (one, two):
            renewing.lease.progress(41, "step", Version(40, 1))
        assert any(
            kind == "change" and value["rooms"][0]["step"] == 41 and "fine" not in value["rooms"][0]
            for kind, value in events
        )
        assert time.monotonic() - began < 5


def test_a_browser_that_reads_nothing_is_cut_off_and_costs_no_lease(
    start: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_app, "WRITE_S", 0.3)
    monkeypatch.setattr(dashboards, "TICK_S", 0.002)
    monkeypatch.setattr(dashboards, "SEND_BYTES", 4096)
    monkeypatch.setattr(dashboards, "SHARE", 1.0)
    here = start()
    one, two = here.quorum("a:1", "b:1")
    with here.watch(buffer=2048) as slow:
        feed = here.feed
        wait_until(lambda: len(feed.readers) == 1)
        wait_until(lambda: not feed.readers)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(1 << 16):
                pass
    assert one.recorder.of("member_lost") == two.recorder.of("member_lost") == []


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", b"\x00\xff\r\n\r\n",
             b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_http_is_no_news(here: Here, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Who looks for open ports does not fill the log of the job."""
    with here.connect() as client:
        client.sendall(sent)
        assert b" 400 " in client.recv(1 << 16).partition(b"\r\n")[0]
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_more_browsers_than_places_are_refused_in_words(here: Here) -> None:
    here.quorum("a:1")
    with contextlib.ExitStack() as stack:
        for _ in range(READERS_MAX):
            client = stack.enter_context(here.watch())
            assert next(read_events(client))[0] == "page"
        status, text, _ = here.ask("/events")
        assert (status, "close one of them" in text) == (503, True)
    wait_until(lambda: not here.feed.readers)
    with here.watch() as client:
        assert next(read_events(client))[0] == "page"


def test_connections_are_bounded(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards, "CONNECTIONS_MAX", 3)
    wait_until(lambda: here.ask("/readyz")[0] == 200)
    with contextlib.ExitStack() as stack:

        def one_more() -> bool:
            """False while the connection of the question before has not ended over there."""
            client = stack.enter_context(here.watch())
            return b" 200 " in client.recv(1 << 16).partition(b"\r\n")[0]

        for _ in range(3):
            wait_until(one_more)
        status, text, _ = here.ask("/healthz")
        assert (status, "3 connections are open already" in text) == (503, True)
    wait_until(lambda: here.ask("/healthz")[0] == 200)


def test_who_connects_and_is_silent_is_sent_away(start: Callable[..., Here], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "SILENT_S", 0.2)
    here = start()
    with here.connect() as silent, here.watch() as browser:
        silent.sendall(b"GET / HTTP/1.1\r\n")
        events = read_events(browser)
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(100) == b""
        assert [next(events)[0] for _ in range(3)] == ["page", "change", "change"], "who has asked stays"


def test_ten_browsers_hold_up_nobody(here: Here) -> None:
    """The page is made once for all; leases are acknowledged as before."""
    one, _ = here.quorum("a:1", "b:1")
    with contextlib.ExitStack() as stack:
        streams = [read_events(stack.enter_context(here.watch())) for _ in range(10)]
        for _ in range(4):
            assert len({json.dumps(next(events)[1]["at"]) for events in streams}) <= 2
        acked = one.lease.last_ack
        wait_until(lambda: one.lease.last_ack > acked)
    assert one.recorder.of("member_lost") == []


# ---------------------------------------------------------------- orders


def wish(replica: str, reason: str = "") -> dict[str, str]:
    return {"room": "default", "replica": replica, "reason": reason}


@pytest.mark.parametrize("what", ["drain", "kill"])
def test_an_order_reaches_the_replica_and_is_written_down(here: Here, what: str) -> None:
    one, two = here.quorum("a:1", "b:1")
    status, text, _ = here.ask(f"/{what}", "POST", wish("b:1", "maintenance"), ORDER)
    assert (status, json.loads(text)) == (200, {"told": ["b:1"]})
    assert two.recorder.wait(what) == ("maintenance",)
    assert one.recorder.of(what) == []
    wait_until(lambda: any("b:1 was ordered to" in told["text"] for told in here.room()["story"]))


@pytest.mark.parametrize(
    ("without", "more", "status", "words"),
    [
        ("Authorization", {}, 401, "the admin token is missing"),
        ("", {"Authorization": "Bearer job"}, 401, "the admin token is wrong"),
        ("X-FT-Dashboard", {}, 403, "X-FT-Dashboard"),
        ("", {"Origin": "https://evil.example"}, 403, "not from https://evil.example"),
        ("", {"Sec-Fetch-Site": "cross-site"}, 403, "another site"),
        ("", {"Host": "evil.example"}, 403, "loopback"),
    ],
)
def test_others_orders_are_refused(here: Here, without: str, more: dict[str, str], status: int, words: str) -> None:
    (one,) = here.quorum("a:1")
    given = {name: value for name, value in ORDER.items() if name != without} | more
    answer = here.ask("/kill", "POST", wish("a:1"), given)
    assert answer[0] == status
    assert words in answer[1]
    assert one.recorder.of("kill") == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"[" * 9000, b'{"room":"default"}',
     wish(""), {**wish("a:1"), "more": 1}, wish("a:1", "x" * 201),
     {**wish("a:1"), "reason": 3}],
)  # fmt: skip
def test_what_is_no_order_is_refused(here: Here, body: Any) -> None:
    assert here.ask("/kill", "POST", body, ORDER)[0] == 400


def test_a_body_that_is_too_large_is_refused(here: Here) -> None:
    assert here.ask("/kill", "POST", b"x" * 100_000, ORDER)[0] == 413


def test_an_order_to_who_is_not_there_says_so(here: Here) -> None:
    here.quorum("a:1")
    status, text, _ = here.ask("/drain", "POST", wish("z:9"), ORDER)
    assert (status, text) == (409, "z:9 has no lease in room default: nobody was told\n")


def test_no_site_gets_leave_to_ask(here: Here) -> None:
    """CORS: the preflight of another site's page is not answered with a permission."""
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    status, _, headers = here.ask("/kill", "OPTIONS", headers=asks)
    assert status == 405
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_without_tokens_there_are_no_orders(start: Callable[..., Here]) -> None:
    here = start(token="", admin_token="")
    status, text, _ = here.ask("/kill", "POST", wish("a:1"), ORDER)
    assert status == 403
    assert "set FT_ADMIN_TOKEN" in text
    assert here.status()["orders"] == {"on": False, "why": text.strip()}


# ---------------------------------------------------------------- where it listens, and whether


def test_a_port_that_was_named_and_is_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http=127.0.0.1:{port} cannot be bound: the port is in use"):
            LighthouseServer("127.0.0.1:0", token="", http=f"127.0.0.1:{port}")


def test_the_usual_port_in_use_stops_nobody(start: Callable[..., Here]) -> None:
    with contextlib.ExitStack() as stack:
        for family in (socket.AF_INET, socket.AF_INET6):
            taken = stack.enter_context(socket.socket(family))
            with contextlib.suppress(OSError):  # another job's dashboard is there, or there is no IPv6: as good
                taken.bind(("localhost", PORT))
                taken.listen()
        here = start(http=AUTO)
        assert here.port != PORT
        wait_until(lambda: here.ask("/readyz")[0] == 200)


def test_a_usual_place_that_cannot_be_bound_stops_nobody(
    start: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", nowhere)
        server = LighthouseServer("127.0.0.1:0", token="", http=AUTO)
    try:
        assert server.http_address() == ""
        assert server.http_line().startswith("there is no dashboard: http=localhost:29511 cannot be bound")
    finally:
        server.shutdown()


def test_without_the_library_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards, "available", lambda: False)
    server = LighthouseServer("127.0.0.1:0", token="", http=AUTO)
    server.shutdown()
    assert server.http_line() == (
        "there is no dashboard, because aiohttp is not installed: pip install 'ft-training[dashboard]'"
    )
    with pytest.raises(ConfigError, match=r"http=127.0.0.1:0: there is no dashboard, because aiohttp"):
        LighthouseServer("127.0.0.1:0", token="", http="127.0.0.1:0")


@pytest.mark.process
def test_the_command_without_the_library() -> None:
    code = (
        "import sys; sys.modules['aiohttp'] = None\nfrom ft_core.lighthouse import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--bind", "127.0.0.1:0"]
    wrong = subprocess.run([*command, "--http", "127.0.0.1:0"], capture_output=True, text=True, timeout=30, check=False)
    assert wrong.returncode == 2
    assert "--http 127.0.0.1:0: there is no dashboard, because aiohttp is not installed: pip install" in wrong.stderr
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("ft-lighthouse listens on")
        assert running.stdout.readline().startswith("there is no dashboard, because aiohttp is not installed")
        running.terminate()
        assert running.wait(10) == 0


def test_nobody_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LighthouseServer("127.0.0.1:0", token="")
    server.shutdown()
    assert server.http_line() == server.http_address() == ""


@pytest.mark.parametrize("where", ["0.0.0.0:0", "[::]:0"])
def test_for_everybody_it_needs_a_token(where: str) -> None:
    with pytest.raises(ConfigError, match=r"http=.* without FT_TOKEN: .* sees the job"):
        LighthouseServer("127.0.0.1:0", token="", http=where)
    LighthouseServer("127.0.0.1:0", token="", http=where, insecure=True).shutdown()


@pytest.mark.parametrize("where", ["nowhere", "localhost:99999", "no.such.host.invalid:1"])
def test_an_address_that_cannot_be_is_an_error(where: str) -> None:
    with pytest.raises(ConfigError, match="http="):
        LighthouseServer("127.0.0.1:0", token="", http=where)


def serial(here: Here, ca: Authority) -> int:
    """Of the certificate that the dashboard shows to a browser, which has none."""
    context = ssl.create_default_context(cadata=ca.own.pem.decode())
    with context.wrap_socket(here.connect(), server_hostname="localhost") as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: trainer0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"").serial_number


def test_other_machines_reach_it_over_tls(start: Callable[..., Here], tmp_path: pathlib.Path) -> None:
    """Also with a certificate that was replaced meanwhile."""
    ca = Authority()
    here = start(http="0.0.0.0:0", tls=ca.files(tmp_path))
    here.host = "127.0.0.1"
    assert here.server.http_address().startswith("https://")
    before = serial(here, ca)
    ca.files(tmp_path)
    wait_until(lambda: serial(here, ca) != before)
