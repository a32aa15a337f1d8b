"""The parameter server: sessions with real groups, and what becomes of them when one side fails."""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from ft_core import ParameterServer, ProcessGroupGloo, parameter_server
from ft_core.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
