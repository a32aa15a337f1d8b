"""Who trains does not order others to end: drain and kill take the admin token, everything else the job's."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError, RefusedError
from tests.control.recorder import Replica

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON = timedelta(seconds=5)


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FT_TOKEN", "FT_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", token="job", admin_token="chief")
    yield server
    server.shutdown()


def test_a_holder_of_the_jobs_token_trains_and_orders_nobody(lighthouse: LighthouseServer) -> None:
    one = Replica(lighthouse.address(), "a:1", token="job")
    client = LighthouseClient(lighthouse.address(), SOON, token="job")
    try:
        one.lease.wait_connected(5)
        for order in (client.drain, client.kill):
            with pytest.raises(RefusedError, match="orders to drain or kill need the admin token here: set FT_ADMIN_"):
                order("a", "for fun")
        one.ask()
        assert one.answer().ids == ("a:1",)
        assert not [name for name in ("drain", "kill") if one.recorder.of(name)]
        # A supervisor's reports take the job's token: docs/security.md says why.
        assert client.report_ended("nobody:1") is False
        client.report_given_up("b", "its host burnt down")
        assert "b" in client.status().rooms[0].given_up
    finally:
        client.close()
        one.close()


@pytest.mark.parametrize("token", ["job", ""])
def test_a_holder_of_the_admin_token_orders(lighthouse: LighthouseServer, token: str) -> None:
    """With the other token as well, or without it: it is enough for everything else, too."""
    one = Replica(lighthouse.address(), "a:1", token="job")
    client = LighthouseClient(lighthouse.address(), SOON, token=token, admin_token="chief")
    try:
        one.lease.wait_connected(5)
        assert client.status().rooms[0].replicas[0].replica_id == "a:1"
        assert client.drain("a", "an update") == ["a:1"]
        assert one.recorder.wait("drain") == ("an update",)
    finally:
        client.close()
        one.close()


def test_neither_is_refused_as_before(lighthouse: LighthouseServer) -> None:
    for token in ("", "wrong", "chie"):
        with pytest.raises(RefusedError, match="FT_TOKEN"):
            LighthouseClient(lighthouse.address(), SOON, token=token, admin_token=token)
    client = LighthouseClient(lighthouse.address(), SOON, token="job", admin_token="wrong")
    with pytest.raises(RefusedError, match="FT_TOKEN differs"):
        client.kill("a")
    client.close()


def test_without_an_admin_token_the_jobs_is_enough() -> None:
    server = LighthouseServer("127.0.0.1:0", token="job")
    client = LighthouseClient(server.address(), SOON, token="job")
    assert client.kill("nobody") == []
    client.close()
    server.shutdown()
    server = LighthouseServer("127.0.0.1:0", token="")
    client = LighthouseClient(server.address(), SOON, token="")
    with pytest.raises(RefusedError, match="only taken by a lighthouse that was started with FT_TOKEN or FT_ADMIN_T"):
        client.kill("nobody")
    client.close()
    server.shutdown()


def test_both_sides_take_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TOKEN", "job")
    monkeypatch.setenv("FT_ADMIN_TOKEN", "chief")
    server = LighthouseServer("127.0.0.1:0")
    client = LighthouseClient(server.address(), SOON)
    assert client.drain("nobody") == []
    client.close()
    server.shutdown()
    monkeypatch.setenv("FT_ADMIN_TOKEN", "job")
    with pytest.raises(ConfigError, match="FT_ADMIN_TOKEN is equal to FT_TOKEN"):
        LighthouseServer("127.0.0.1:0")


@pytest.mark.process
def test_the_command_takes_it_from_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "admin"
    file.write_text("chief\n")
    command = [sys.executable, "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0", "--admin-token-file"]
    env = {"FT_TOKEN": "job", "PATH": "", "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2])}
    wrong = subprocess.run([*command, "/nowhere"], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (wrong.returncode, wrong.stderr.count("--admin-token-file /nowhere cannot be read")) == (2, 1)
    with subprocess.Popen([*command, str(file)], env=env, stdout=subprocess.PIPE, text=True) as lighthouse:
        assert lighthouse.stdout is not None
        where = lighthouse.stdout.readline().rpartition(" ")[2].strip()
        client = LighthouseClient(where, SOON, token="job")
        with pytest.raises(RefusedError, match="admin token"):
            client.drain("a")
        client.close()
        client = LighthouseClient(where, SOON, token="job", admin_token="chief")
        assert client.drain("a") == []
        client.close()
        lighthouse.terminate()
