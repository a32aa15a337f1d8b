"""With certificates, everything of the control plane is encrypted, and nothing else gets in."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ft_core.client import LeaseClient, LeaseSettings
from ft_core.coordination import LighthouseClient, LighthouseServer
from ft_core.errors import ConfigError, LighthouseError
from ft_core.membership import Hello
from ft_core.rpc import Tls
from tests.control.recorder import BUDGET, Recorder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate for this machine, signed by itself: it is its own CA."""
    folder: Path = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", "/CN=ft", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
        ],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    return Tls(str(cert), str(key), str(cert))


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
        LighthouseClient(server.address(), timedelta(seconds=0.3), tls=None)
    server.shutdown()


def test_a_missing_file_is_named(tls: Tls) -> None:
    with pytest.raises(ConfigError, match=r"FT_TLS_KEY.*nowhere"):
        LighthouseServer("127.0.0.1:0", tls=replace(tls, key="/nowhere"))
    with pytest.raises(ConfigError, match="both FT_TLS_CERT and FT_TLS_KEY"):
        LighthouseServer("127.0.0.1:0", tls=Tls(ca=tls.ca))
