"""The parameter server: sessions with real groups, and what becomes of them when one side fails."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core import ParameterServer, ProcessGroupGloo, parameter_server
from ft_core.errors import CollectiveError, ConfigError
from tests.certificates import Authority, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ft_core.certificates import Tls
    from ft_core.process_group import ProcessGroup

WAIT_S = 20.0


class Adding(ParameterServer):
    """Adds 23 to what it is sent, until it is sent something negative."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.sessions: list[str] = []
        super().__init__(port=0, hostname="127.0.0.1")

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(hostname="127.0.0.1")

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        self.sessions.append(session_id)
        data = torch.zeros(1)
        while True:
            pg.broadcast_one(data, root=1).wait()
            if data.item() < 0:
                self.failed.set()
                raise ValueError("a negative number")
            if data.item() == 0:
                return
            data += 23
            pg.broadcast_one(data, root=0).wait()


@pytest.fixture
def server() -> Iterator[Adding]:
    server = Adding()
    yield server
    server.shutdown()
    server.shutdown()


def ask(pg: ProcessGroup, value: float) -> float:
    data = torch.full((1,), float(value))
    pg.broadcast_one(data, root=1).wait()
    pg.broadcast_one(data, root=0).wait()
    return data.item()


def test_a_session_of_several_operations(server: Adding) -> None:
    pg = Adding.new_session(server.address())
    assert (pg.rank(), pg.size()) == (1, 2)
    assert [ask(pg, 12.0), ask(pg, 1.0)] == [35.0, 24.0]
    pg.broadcast_one(torch.zeros(1), root=1).wait()
    pg.shutdown()


def test_sessions_at_the_same_time(server: Adding) -> None:
    def one(value: float) -> float:
        pg = Adding.new_session(server.address())
        try:
            return ask(pg, value)
        finally:
            pg.shutdown()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(1, 9))) == [value + 23.0 for value in range(1, 9)]
    assert len(set(server.sessions)) == 8


def test_a_failure_ends_that_session_only(server: Adding, caplog: pytest.LogCaptureFixture) -> None:
    other, pg = Adding.new_session(server.address()), Adding.new_session(server.address())
    with caplog.at_level(logging.ERROR, "ft_core"):
        with pytest.raises(CollectiveError):
            ask(pg, -1.0)
        assert server.failed.wait(WAIT_S)
    assert ask(other, 5.0) == 28.0
    again = Adding.new_session(server.address())
    assert ask(again, 6.0) == 29.0
    for group in (pg, other, again):
        group.shutdown()


def test_a_client_that_goes_ends_its_session(server: Adding) -> None:
    pg = Adding.new_session(server.address())
    assert ask(pg, 1.0) == 24.0
    pg.shutdown()
    again = Adding.new_session(server.address())
    assert ask(again, 2.0) == 25.0
    again.shutdown()


def test_shutdown_ends_open_sessions(server: Adding) -> None:
    pg = Adding.new_session(server.address())
    assert ask(pg, 1.0) == 24.0
    server.shutdown()
    with pytest.raises(CollectiveError):
        ask(pg, 1.0)
    with pytest.raises(CollectiveError, match=r"no session at 'http://127"):
        Adding.new_session(server.address())
    pg.shutdown()


def test_who_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TOKEN", "secret")
    server = Adding()
    pg = Adding.new_session(server.address())
    monkeypatch.setattr(parameter_server, "MAX_SESSIONS", 1)
    with pytest.raises(CollectiveError, match="503"):
        Adding.new_session(server.address())
    monkeypatch.setenv("FT_TOKEN", "another")
    with pytest.raises(CollectiveError, match="401: the token differs"):
        Adding.new_session(server.address())
    with pytest.raises(urllib.error.HTTPError) as other:
        urllib.request.urlopen(server.address() + "s", timeout=WAIT_S)
    assert other.value.code == 404
    other.value.close()
    pg.shutdown()
    server.shutdown()


def test_a_port_that_is_taken(server: Adding) -> None:
    port = server._server.server_address[1]

    class There(Adding):
        def __init__(self) -> None:
            ParameterServer.__init__(self, port, hostname="127.0.0.1")

    with pytest.raises(ConfigError, match=f"port={port}: cannot listen on 127.0.0.1"):
        There()

    class Stored(Adding):
        def __init__(self) -> None:
            ParameterServer.__init__(self, 0, port, hostname="127.0.0.1")

    with pytest.raises(ConfigError, match=f"store_port={port}: no store can listen"):
        Stored()


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tls:
    tls = Authority().files(tmp_path / "tls")
    for name, text in environment(tls).items():
        monkeypatch.setenv(name, text)
    return tls


def test_sessions_are_asked_for_over_tls(encrypted: Tls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Adding()
    assert server.address().startswith("https://127.0.0.1:")
    silent = socket.create_connection(("127.0.0.1", server._server.server_address[1]))
    pg = Adding.new_session(server.address())  # while somebody else's handshake hangs
    assert ask(pg, 1.0) == 24.0
    pg.shutdown()
    silent.close()
    with pytest.raises(ConfigError, match="does not use TLS, and FT_TLS_"):
        Adding.new_session(server.address().replace("https:", "http:"))
    for name, text in environment(Authority().files(tmp_path / "other")).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(CollectiveError, match="certificate verify failed"):
        Adding.new_session(server.address())
    for name in environment(encrypted):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="asks for TLS, and there are no certificates"):
        Adding.new_session(server.address())
    server.shutdown()


def test_nobody_is_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect would take the proof of the token along, and leave TLS."""
    monkeypatch.setenv("FT_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, socket.create_server(("127.0.0.1", 0)) as listener:
        elsewhere.setblocking(False)

        def redirect() -> None:
            with listener.accept()[0] as sock:
                sock.recv(65536)
                where = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/new_session"
                sock.sendall(f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=redirect, daemon=True)
        thread.start()
        with pytest.raises(CollectiveError, match="302"):
            Adding.new_session(f"http://127.0.0.1:{listener.getsockname()[1]}/new_session")
        thread.join(WAIT_S)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_no_proxy_of_the_environment_is_asked(server: Adding, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see the proof of the token, and answer in the server's place; neither gRPC nor heals ask one."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    pg = Adding.new_session(server.address())
    assert ask(pg, 1.0) == 24.0
    pg.shutdown()


def test_who_is_silent_is_sent_away(encrypted: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_server._Handler, "timeout", 0.2)
    assert parameter_server.REQUEST_S <= 10, "docs/security.md says so of all listeners"
    server = Adding()
    try:
        with socket.create_connection(("127.0.0.1", server._server.server_address[1]), timeout=WAIT_S) as half:
            half.sendall(b"\x16\x03\x01\x02")
            assert half.recv(100) == b""
        for _ in range(20):  # gone before anything is done about them
            gone = socket.create_connection(("127.0.0.1", server._server.server_address[1]))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()
        pg = Adding.new_session(server.address())
        assert ask(pg, 1.0) == 24.0
        pg.shutdown()
    finally:
        server.shutdown()


def test_silent_strangers_take_a_bounded_number_of_places_and_sessions_none(
    server: Adding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_server, "MAX_ASKING", 2)
    groups = [Adding.new_session(server.address()) for _ in range(3)]
    where = ("127.0.0.1", server._server.server_address[1])
    held = [socket.create_connection(where, timeout=WAIT_S) for _ in range(2)]
    with socket.create_connection(where, timeout=parameter_server.REQUEST_S / 2) as third:
        assert third.recv(1) == b"", "it is closed at once, and not for its silence"
    assert [ask(pg, 1.0) for pg in groups] == [24.0] * 3
    for stranger in held:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        while stranger.recv(1 << 12):
            pass
        stranger.close()
    again = Adding.new_session(server.address())
    assert ask(again, 2.0) == 25.0
    for pg in (*groups, again):
        pg.shutdown()


def test_for_other_machines_it_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    class Public(Adding):
        def __init__(self, hostname: str | None) -> None:
            ParameterServer.__init__(self, 0, hostname=hostname)

    with pytest.raises(ConfigError, match=r"hostname='0\.0\.0\.0': a parameter server without FT_TOKEN: whoever"):
        Public("0.0.0.0")
    alone = Public(None)
    assert alone.address().startswith("http://127.0.0.1:")
    alone.shutdown()
    monkeypatch.setenv("FT_INSECURE", "1")
    server = Public("0.0.0.0")
    server.shutdown()
