"""Pages that say the same about the same thing."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from ft_core.certificates import Tls
from ft_core.errors import ConfigError

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES = ("lightning.md", "accelerate.md", "own-loop.md")
HEADING = "## What every loop has\n"


def test_what_every_loop_has_is_said_in_the_same_words() -> None:
    said = {page: (DOCS / page).read_text().split(HEADING)[1].split("\n## ")[0] for page in PAGES}
    assert len(set(said.values())) == 1
    assert said["lightning.md"].count("\n| ") >= 8


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the page makes certificates with openssl")
def test_the_certificates_that_the_security_page_makes_work(tmp_path: pathlib.Path) -> None:
    """As they are written there, and for the machines that they name."""
    page = (DOCS / "security.md").read_text()
    commands = page[page.index("openssl req -x509") : page.index("export FT_TLS_CA")]
    subprocess.run(["bash", "-e"], input=commands, cwd=tmp_path, text=True, capture_output=True, timeout=60, check=True)
    tls = Tls(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), str(tmp_path / "ca.pem"))
    for host in ("host0", "host1", "10.0.0.11", "127.0.0.1", "localhost"):
        tls.check_names(host)
    with pytest.raises(ConfigError, match="is not made for host2"):
        tls.check_names("host2")
