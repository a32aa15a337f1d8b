"""Who may come in: where a lighthouse listens without a token, and what a token that it no longer accepts does."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ft_core.access import open_to_all
from ft_core.certificates import Tls
from ft_core.checkpointing import StateServer
from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.coordination import ManagerServer
from ft_core.errors import ConfigError, RefusedError
from ft_core.lighthouse import main
from ft_core.rpc import channel
from tests.certificates import Authority
from tests.control.recorder import BUDGET, Replica, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("host", "token", "tls", "open_"),
    [
        ("localhost", "", None, False),
        ("127.0.0.1", "", None, False),
        ("127.8.0.1", "", None, False),
        ("::1", "", None, False),
        ("::", "", None, True),
        ("0.0.0.0", "", None, True),
        ("", "", None, True),
        ("10.0.0.7", "", None, True),
        ("trainer0", "", None, True),
        ("::", "secret", None, False),
        ("::", "", Tls("c", "k", "ca"), False),
        ("::", "", Tls("c", "k"), True),
    ],
)
def test_what_is_open_to_all(host: str, token: str, tls: Tls | None, open_: bool) -> None:
    assert open_to_all(host, token, tls) is open_


@pytest.mark.parametrize("bind", ["[::]:0", "0.0.0.0:0", ":0"])
def test_the_command_refuses_to_listen_for_everybody(
    bind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FT_TOKEN", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(
        "ft_core.control.lighthouse.cli._log_to_stderr", lambda: logging.handlers.QueueListener(queue.Queue())
    )
    monkeypatch.setattr("logging.handlers.QueueListener.stop", lambda _: None)
    assert main(["--bind", bind]) == 2
    said = capsys.readouterr().err
    assert f"--bind {bind} without FT_TOKEN" in said
    assert "whoever reaches this address may stop the job" in said
    assert "stay on this machine (localhost, 127.0.0.1)" in said
    assert "FT_INSECURE=1 (ftrun, ft-lighthouse: --insecure)" in said


def test_so_does_the_class(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "ft_core.lighthouse")
    with pytest.raises(ConfigError, match=r"bind=0\.0\.0\.0:0 without FT_TOKEN: whoever .*FT_INSECURE=1"):
        LighthouseServer("0.0.0.0:0", token="")
    LighthouseServer("0.0.0.0:0", token="secret").shutdown()
    LighthouseServer("localhost:0", token="").shutdown()
    assert not caplog.records
    LighthouseServer("0.0.0.0:0", token="", insecure=True).shutdown()
    monkeypatch.setenv("FT_INSECURE", "1")
    LighthouseServer("0.0.0.0:0", token="").shutdown()
    assert [r.message.partition(":")[0] for r in caplog.records] == ["bind=0.0.0.0"] * 2


def test_who_names_no_address_stays_here_without_a_token() -> None:
    closed = LighthouseServer(token="")
    assert closed.address().startswith("http://localhost:")
    closed.shutdown()
    for token, insecure in (("secret", False), ("", True)):
        server = LighthouseServer(token=token, insecure=insecure)
        assert not server.address().startswith("http://localhost:")
        server.shutdown()
    heals = StateServer()
    assert repr(heals) == "StateServer(no address, new, offers=[], Places(0 served, 0 waiting, 0 parked))"
    assert heals.start().address.startswith("http://127.0.0.1:")
    heals.shutdown()
    with pytest.raises(ConfigError, match=r"the server of this replica's state \(bind=''\) without FT_TOKEN"):
        StateServer(hostname="trainer0").start()
    StateServer("secret", hostname="trainer0").start().shutdown()


def test_the_server_of_a_groups_ranks_does_too(lighthouse: LighthouseServer) -> None:
    where = lighthouse.address()
    makes: tuple[Callable[[], ManagerServer], ...] = (
        lambda: ManagerServer("g:1", where, bind="[::]:0", token=""),
        lambda: ManagerServer("g:1", where, hostname="trainer0", token=""),
    )
    for make in makes:
        with pytest.raises(ConfigError, match=r"the server of this replica's ranks \(bind=\[::\]:0\) without FT_TOKEN"):
            make()
    server = ManagerServer("g:1", lighthouse.address(), connect_timeout=timedelta(seconds=5), token="")
    assert server.address().startswith("http://localhost:")
    server.shutdown()


def test_localhost_is_both_loopback_addresses() -> None:
    server = LighthouseServer("localhost:0", token="")
    port = int(server.address().rpartition(":")[2])
    for family, host in {(info[0], info[4][0]) for info in socket.getaddrinfo("localhost", port)}:
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(2)
            client.connect((host, port))
    server.shutdown()


def test_a_lighthouse_that_returns_with_another_token_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    first = LighthouseServer("127.0.0.1:0", token="ours")
    where = f"127.0.0.1:{int(first.address().rpartition(':')[2])}"
    one = Replica(first.address(), "a:1", token="ours")
    try:
        one.lease.wait_connected(5)
        first.shutdown()
        wrong = LighthouseServer(where, token="another")
        try:
            # The lease's thread notes the reason first and logs it then.
            wait_until(lambda: any("FT_TOKEN differs" in r.message for r in caplog.records if r.levelname == "WARNING"))
            assert "FT_TOKEN differs" in one.lease.last_reason
            assert not one.recorder.of("refused")
        finally:
            wrong.shutdown()
        again = LighthouseServer(where, token="ours")
        wait_until(lambda: one.lease.connected)
        again.shutdown()
    finally:
        one.close()


def test_a_token_that_is_not_accepted_is_final_once_autonomy_is_over() -> None:
    first = LighthouseServer("127.0.0.1:0", token="ours")
    where = f"127.0.0.1:{int(first.address().rpartition(':')[2])}"
    one = Replica(first.address(), "a:1", token="ours", budget=replace(BUDGET, autonomy_s=0.5))
    try:
        one.lease.wait_connected(5)
        first.shutdown()
        wrong = LighthouseServer(where, token="another")
        (error,) = one.recorder.wait("refused")
        assert isinstance(error, RefusedError)
        assert "FT_TOKEN differs" in str(error)
        wrong.shutdown()
    finally:
        one.close()


def test_a_status_of_names_has_nobody_else(trio: list[Replica], lighthouse: LighthouseServer) -> None:
    assert len(trio) == 3
    client = LighthouseClient(lighthouse.address(), timedelta(seconds=5))
    (everybody,) = client.status().rooms
    (some,) = client.status(names=["b", "c:1", "nobody"]).rooms
    client.close()
    assert [r.replica_id for r in everybody.replicas] == ["a:1", "b:1", "c:1"]
    assert list(everybody.members) == ["a:1", "b:1", "c:1"]
    assert [(r.replica_id, r.member) for r in some.replicas] == [("b:1", True), ("c:1", True)]
    assert (len(some.members), some.member_count, everybody.member_count) == (0, 3, 3)


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n"], ids=["nothing", "TLS", "HTTP"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["in clear", "encrypted"])
def test_who_connects_and_is_silent_keeps_nobody_out_and_is_sent_away(
    encrypted: bool, says: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 1.0)
    tls = Authority().files(tmp_path) if encrypted else None
    server = LighthouseServer("127.0.0.1:0", token="secret", tls=tls)
    strangers = [socket.create_connection(("127.0.0.1", int(server.address().rpartition(":")[2]))) for _ in range(50)]
    try:
        for sock in strangers:
            sock.sendall(says)
        client = LighthouseClient(server.address(), timedelta(seconds=5), token="secret", tls=tls)
        assert not client.status().rooms
        client.close()
        for sock in strangers:
            sock.settimeout(10)
            try:
                while sock.recv(4096):  # what it sends before it has read anything
                    pass
            except ConnectionResetError:
                pass
    finally:
        for sock in strangers:
            sock.close()
        server.shutdown()
