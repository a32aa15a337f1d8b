"""ft-doctor on several machines at once: real processes in network namespaces, with a host name and mounts of each."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.chaos.network import Network

ROOT = Path(__file__).resolve().parents[2]
SKEWED = """
import sys, time
right, by = time.time, float(sys.argv.pop(1))
time.time = lambda: right() + by
from ft_core.doctor.cli import main
sys.exit(main())
"""
"""ft-doctor on a host whose clock is wrong."""
END_S = 100.0
ROOMY = "mount -t tmpfs -o size=2g none /dev/shm && ulimit -n 4096"
"""A host with enough of what a container may lack."""


@dataclass
class Host:
    """How one host is set up, and what its ft-doctor is asked."""

    env: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    before: str = ""
    """Shell commands in the host's own mount namespace, before ft-doctor."""
    clock_s: float = 0.0
    """So far its clock is ahead."""


@dataclass
class Report:
    """What one ft-doctor has printed."""

    status: int
    findings: list[dict[str, Any]]
    stderr: str

    def about(self, check: str, level: str) -> dict[str, Any]:
        """The one finding about this of this level."""
        found = [f for f in self.findings if (f["check"], f["level"]) == (check, level)]
        assert len(found) == 1, (check, level, self.findings, self.stderr)
        return found[0]

    def all_about(self, check: str, level: str) -> dict[str, str]:
        """What is said about this, by host."""
        found: dict[str, str] = {}
        for f in self.findings:
            if (f["check"], f["level"]) == (check, level):
                found[f["where"]] = f"{found[f['where']]}; {f['text']}" if f["where"] in found else f["text"]
        return found


def command(network: Network, name: str, host: Host, where: str, hosts: int) -> list[str]:
    """Runs on a machine, whose host name is `name`."""
    options = ["--meet", where, "--hosts", str(hosts), *host.options] if where else host.options
    program = ["-c", SKEWED, str(host.clock_s)] if host.clock_s else ["-m", "ft_core.doctor.cli"]
    doctor = shlex.join([sys.executable, *program, "--json", *options])
    steps = [f"hostname {name}", ROOMY, *filter(None, [host.before]), f"exec {doctor}"]
    return network.on(name, ["unshare", "--uts", "sh", "-c", " && ".join(steps)])


def environment(env: Mapping[str, str]) -> dict[str, str]:
    python = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(ROOT)])
    return {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **env, "PYTHONPATH": python}


@contextlib.contextmanager
def running(
    network: Network, hosts: Mapping[str, Host], where: str, count: int
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once; whoever is left at the end is killed."""
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, host in hosts.items():
            started[name] = subprocess.Popen(
                command(network, name, host, where, count), env=environment(host.env), stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def reports(started: Mapping[str, subprocess.Popen[str]]) -> dict[str, Report]:
    """What those print who print something, when all have ended."""
    found = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=END_S)
        if out:
            found[name] = Report(process.returncode, json.loads(out)["findings"], err)
        else:
            assert "is printed once for all hosts" in err, (name, process.returncode, err)
    return found


def examine(
    network: Network, hosts: Mapping[str, Host], where: str | None = None, count: int = 0
) -> dict[str, Report]:  # fmt: skip
    """ft-doctor on all of them, which meet at the first one; `where` '': each alone, or as its environment says."""
    place = network.address(next(iter(hosts))) if where is None else where
    with running(network, hosts, place, count or len(hosts)) as started:
        return reports(started)
