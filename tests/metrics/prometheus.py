"""A real Prometheus, and its promtool, where they are installed (Debian: apt-get install prometheus)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
READY_S = 30.0
REQUIRED = "TEST_NEEDS_PROMETHEUS"
"""Set: no test may be skipped for want of it."""
_pause = threading.Event()
CONFIG = """
global: {{scrape_interval: 200ms, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
{jobs}
"""


def binary(name: str) -> str:
    """Where it is; skips the test if it is not there, and fails it under `scripts/check-metrics`."""
    found = shutil.which(name)
    if found is None:
        give_up = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
        give_up(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def promtool(*arguments: str, text: str | None = None, cwd: Path = MONITORING) -> str:
    """What it says. Fails with that if it finds something wrong."""
    ran = subprocess.run(
        [binary("promtool"), *arguments], input=text, capture_output=True, text=True, timeout=50, cwd=cwd, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """An answer of its API. Raises ValueError with what it finds wrong in a query."""
        where = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(where, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def query(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values that a query has now."""
        found = self.get("query", query=query)
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]

    def value(self, query: str) -> float:
        """The one value of a query; nan if there is none."""
        found = self.query(query)
        assert len(found) <= 1, found
        return found[0][1] if found else float("nan")

    def wait(self, query: str, within_s: float = 30.0) -> list[tuple[Mapping[str, str], float]]:
        """Until a query with a condition has a result."""
        until = time.monotonic() + within_s
        while not (found := self.query(query)):
            assert time.monotonic() < until, f"{query}: no result within {within_s:g} s"
            _pause.wait(0.1)
        return found

    def rules(self, within_s: float = 30.0) -> list[dict[str, Any]]:
        """Its rules, each evaluated at least once."""
        until = time.monotonic() + within_s
        while True:
            rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
            if rules and all(rule["health"] != "unknown" for rule in rules):
                return rules
            assert time.monotonic() < until, "rules were not evaluated in time"
            _pause.wait(0.1)


@contextlib.contextmanager
def prometheus(
    folder: Path, port: int, jobs: Mapping[str, Sequence[str]], more: Mapping[str, object] = MappingProxyType({})
) -> Iterator[Prometheus]:
    """One at this port that scrapes these targets five times a second, with our alerts. `more`: of each scrape job."""
    program = binary("prometheus")
    targets = "\n".join(
        f"  - {json.dumps({'job_name': name, 'static_configs': [{'targets': list(where)}], **more})}"
        for name, where in jobs.items()
    )
    (folder / "prometheus.yml").write_text(CONFIG.format(rules=MONITORING / "alerts.yml", jobs=targets))
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until = time.monotonic() + READY_S
            while True:
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5),
                ):
                    break
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                assert time.monotonic() < until, "Prometheus was not ready in time"
                _pause.wait(0.05)
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.kill()
            process.wait()
