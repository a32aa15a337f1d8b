"""With certificates, everything of the control plane is encrypted, and nothing else gets in."""

from __future__ import annotations

import re
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ft_core.certificates import Tls
from ft_core.control.group.tls import group_tls
from ft_core.control.lighthouse.lease_client import LeaseClient, LeaseSettings
from ft_core.coordination import LighthouseClient, LighthouseServer
from ft_core.errors import ConfigError, LighthouseError
from ft_core.protocol.lighthouse.events import Hello
from tests.certificates import Authority, alone, write
from tests.control.recorder import BUDGET, Recorder

if TYPE_CHECKING:
    import ssl


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority().files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """That of another job."""
    return Authority().files(tmp_path_factory.mktemp("other"))


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FT_TLS_CERT", "FT_TLS_KEY", "FT_TLS_CA"):
        monkeypatch.delenv(name, raising=False)


def test_each_of_two_lighthouses_is_proven_by_its_certificate(tls: Tls, other: Tls, nobody: str) -> None:
    """One is gone, one is another job's: what is wrong with either is said, and neither is trusted."""
    server, theirs = (LighthouseServer("127.0.0.1:0", tls=one, token="") for one in (tls, other))
    client = LighthouseClient(f"https://{nobody},{server.address()}", timedelta(seconds=5), tls=tls)
    assert client.active == server.address()
    client.close()
    client = LighthouseClient(f"{theirs.address()},{server.address()}", timedelta(seconds=5), tls=tls)
    assert client.active == server.address()
    client.close()
    with pytest.raises(LighthouseError, match=f"{theirs.address()}: .*CERTIFICATE_VERIFY_FAILED"):
        LighthouseClient(f"{theirs.address()},https://{nobody}", timedelta(seconds=0.5), tls=tls)
    for one in (server, theirs):
        one.shutdown()


def test_only_who_has_a_certificate_gets_in(tls: Tls) -> None:
    server = LighthouseServer("127.0.0.1:0", tls=tls, token="")
    assert server.address().startswith("https://127.0.0.1:")
    settings = LeaseSettings(server.address(), "a:1", BUDGET, tls=tls)
    good = LeaseClient(settings, Recorder(Hello("a:1", "a", 0, 0)))
    good.start()
    good.wait_connected(5)
    client = LighthouseClient(server.address(), timedelta(seconds=5), tls=tls)
    assert client.status().rooms[0].replicas[0].replica_id == "a:1"
    client.close()
    nobody = LeaseClient(replace(settings, tls=Tls(ca=tls.ca)), Recorder(Hello("b:1", "b", 0, 0)))
    nobody.start()
    with pytest.raises(LighthouseError):
        nobody.wait_connected(0.3)
    for lease in (good, nobody):
        lease.shutdown()
    with pytest.raises(LighthouseError):
        LighthouseClient(server.address().removeprefix("https://"), timedelta(seconds=0.3), tls=None)
    server.shutdown()


def test_a_missing_file_is_named(tls: Tls) -> None:
    with pytest.raises(ConfigError, match=r"FT_TLS_KEY.*nowhere"):
        LighthouseServer("127.0.0.1:0", tls=replace(tls, key="/nowhere"))
    with pytest.raises(ConfigError, match="both FT_TLS_CERT and FT_TLS_KEY"):
        LighthouseServer("127.0.0.1:0", tls=Tls(ca=tls.ca))


def test_https_without_certificates_is_an_error_before_anything_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        where = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"addr='https://.*' asks for TLS, and there are no certificates"):
            LighthouseClient(where, timedelta(seconds=1), token="secret")
        with pytest.raises(ConfigError, match=r"lighthouse_addr \(FT_LIGHTHOUSE\)='https://.*set FT_TLS_CA"):
            LeaseClient(LeaseSettings(where, "a:1", BUDGET, token="secret"), Recorder(Hello("a:1", "a", 0, 0)))
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        ("none", "full", "it uses TLS, and no certificates are set here: set FT_TLS_CA"),
        ("none", "pair", "it uses TLS, and no certificates are set here"),
        ("full", "none", "it does not use TLS, and FT_TLS_\\* are set here"),
        ("ca", "full", "it asks for a certificate, and there is none here: set FT_TLS_CERT and FT_TLS_KEY"),
        ("other ca", "pair", "its certificate is none that FT_TLS_CA=.* trusts"),
        ("other pair", "full", "it does not accept the certificate FT_TLS_CERT="),
    ],
)
def test_a_mismatch_is_named(here: str, there: str, says: str, tls: Tls, other: Tls, tmp_path: Path) -> None:
    by_itself = alone()
    sets = {
        "none": None, "full": tls, "pair": write(tmp_path / "alone", by_itself.pem, by_itself.key_pem()),
        "ca": Tls(ca=tls.ca), "other ca": Tls(ca=other.ca), "other pair": replace(other, ca=both(tmp_path, tls, other)),
    }  # fmt: skip
    server = LighthouseServer("127.0.0.1:0", tls=sets[there], token="")
    where = server.address().partition("://")[2]
    one = LeaseClient(LeaseSettings(where, "a:1", BUDGET, tls=sets[here]), Recorder(Hello("a:1", "a", 0, 0)))
    try:
        with pytest.raises(LighthouseError, match=says):
            LighthouseClient(where, timedelta(seconds=0.3), tls=sets[here])
        one.start()
        with pytest.raises(LighthouseError, match=says):
            one.wait_connected(1.0)
    finally:
        one.shutdown()
        server.shutdown()


def test_a_certificate_that_expires_meanwhile_is_named(tls: Tls, tmp_path: Path) -> None:
    """It was good when this process read it."""
    authority = Authority()
    theirs, mine = (authority.files(tmp_path / name, days=days) for name, days in (("them", 2), ("me", 2 / 86400)))
    server = LighthouseServer("127.0.0.1:0", tls=theirs, token="")
    try:
        failed: LighthouseError | None = None
        while failed is None:
            try:
                LighthouseClient(server.address(), timedelta(seconds=5), tls=mine, token="").close()
            except LighthouseError as error:
                failed = error
        assert re.search("FT_TLS_CERT='.*/me/cert.pem', which has expired: replace the file", str(failed))
    finally:
        server.shutdown()


def both(folder: Path, one: Tls, other: Tls) -> str:
    """A file with two CAs, which trusts what either has signed."""
    path = folder / "both.pem"
    path.write_bytes(Path(one.ca).read_bytes() + Path(other.ca).read_bytes())
    return str(path)


def test_a_ca_alone_does_not_leave_the_group_in_clear(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    only_ca = Tls(ca=tls.ca)
    with pytest.raises(ConfigError, match=r"alone encrypts only the way to the lighthouse.*FT_TLS_CERT and FT_TLS_KEY"):
        group_tls(LeaseSettings("h:1", "r", BUDGET, tls=only_ca))
    assert group_tls(LeaseSettings("h:1", "r", BUDGET, tls=tls)) == tls
    assert group_tls(LeaseSettings("h:1", "r", BUDGET)) is None
    monkeypatch.setenv("FT_TLS_CA", tls.ca)
    with pytest.raises(ConfigError, match="FT_TLS_CA="):
        group_tls(LeaseSettings("h:1", "r", BUDGET))


def test_a_certificate_and_its_key_belong_together() -> None:
    with pytest.raises(ConfigError, match="FT_TLS_CERT is set and FT_TLS_KEY is not"):
        Tls.from_env({"FT_TLS_CERT": "c", "FT_TLS_CA": "a"})
    with pytest.raises(ConfigError, match="FT_TLS_KEY is set and FT_TLS_CERT is not"):
        Tls.from_env({"FT_TLS_KEY": "k"})
    assert Tls.from_env({}) is None


def test_python_sockets_use_the_same_certificates(tls: Tls, other: Tls, tmp_path: Path) -> None:
    """What the data plane takes its contexts from."""
    seen: list[str] = []

    def serve(listener: socket.socket, context: ssl.SSLContext) -> None:
        for _ in range(2):
            plain, _ = listener.accept()
            try:
                with context.wrap_socket(plain, server_side=True) as stream:
                    seen.append(stream.recv(10).decode())
            except OSError:
                plain.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, tls.files().now.server), daemon=True)
        thread.start()
        for mine in (replace(other, ca=both(tmp_path, tls, other)), tls):
            plain = socket.create_connection(listener.getsockname(), 5)
            try:
                with mine.files().now.client.wrap_socket(plain, server_hostname="127.0.0.1") as stream:
                    stream.sendall(b"state")
                    stream.recv(1)
            except OSError:
                plain.close()
        thread.join(5)
    assert seen == ["state"]
