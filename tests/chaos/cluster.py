"""Processes for the chaos tests: a lighthouse and trainers that can be killed, frozen, restarted; always ended by id.

Trainers come from a forge if there is one, else each is a new interpreter. Every wait is for an event (a line a process
prints, its end) with a deadline; a reader thread per process feeds one queue of lines per process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.held_ports import HeldPorts

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

    from tests.forge import Forge, Forged

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKER = str(ROOT / "tests/chaos/worker.py")
PROXY = str(ROOT / "tests/chaos/proxy.py")
WAIT_S = 45.0
END_AFTER = 40
"""Steps that all trainers still make together at the end; more than any of them can be ahead of what was read."""


@dataclass(eq=False)
class Process:
    """One process and the lines it has printed, with the time at which they were read."""

    name: str
    popen: subprocess.Popen[bytes] | Forged
    pipes: tuple[IO[str], IO[str]]
    """Its output and its errors."""
    changed: threading.Condition
    """One of all processes of a cluster: what is waited for may be what another one prints."""
    lines: list[tuple[float, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def commits(self) -> list[tuple[float, int, int, str]]:
        """(time read, step, participants, lineage) of every commit."""
        with self.changed:
            rows = [(at, line.split()) for at, line in self.lines if line.startswith("commit ")]
        return [(at, int(row[1]), int(row[2]), row[3]) for at, row in rows]

    def step(self) -> int:
        commits = self.commits()
        return commits[-1][1] if commits else 0

    def wait_for(self, what: Callable[[], bool], why: str) -> None:
        """Wait until `what()` holds, looked at whenever a process of the cluster prints a line."""
        with self.changed:
            if not self.changed.wait_for(lambda: what() or self.popen.poll() is not None, WAIT_S) or not what():
                tail = "\n".join([*self.errors[-12:], *(line for _, line in self.lines[-5:])])
                raise AssertionError(f"{self.name} (exit {self.popen.poll()}) never: {why}\n{tail}")

    def wait_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step, f"reached step {step} (is at {self.step()})")

    def wait_end(self) -> str:
        """Wait for a clean end; returns the digest it printed."""
        code = self.popen.wait(WAIT_S)
        assert code == 0, f"{self.name} exited with {code}:\n" + "\n".join(self.errors[-25:])
        self.wait_for(lambda: any(line.startswith("done ") for _, line in self.lines), "printed its digest")
        return next(line.split()[1] for _, line in self.lines if line.startswith("done "))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.popen.pid, number)


class Cluster:
    """A lighthouse and its trainers; a context manager that ends them all.

    `host` is where the lighthouse listens; `lighthouses`, how many ports are held for it and others like it.

    Args:
        forge: starts the trainers.
        env: what all trainers find in their environment.
    """

    host = "127.0.0.1"
    lighthouses = 1

    def __init__(self, forge: Forge | None = None, **env: object) -> None:
        self.forge = forge
        self.env = {key: str(value) for key, value in env.items()}
        self.processes: list[Process] = []
        self.changed = threading.Condition()
        self.trainers: dict[str, Process] = {}
        self._held = HeldPorts(self.lighthouses + 1)
        *self.ports, self.proxy_port = self._held.numbers
        self.port = self.ports[0]
        self.lighthouse: Process | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ft-chaos-")
        self._end = pathlib.Path(self._folder.name) / "steps"

    def __enter__(self) -> Cluster:
        self.start_lighthouse()
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()
            for _, line in process.lines:  # what a killed launcher has left behind
                if line.startswith("pid "):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(line.split()[1]), signal.SIGKILL)
        self._folder.cleanup()
        for process in self.processes:
            for reader in process.readers:
                reader.join(WAIT_S)  # to the end of what its processes wrote, which have all ended
            for pipe in process.pipes:
                pipe.close()

    def start_lighthouse(self) -> None:
        """Start (or restart) the lighthouse on this cluster's port, and wait until it listens."""
        self.lighthouse = self.lighthouse_at(self.port, "lighthouse")

    def lighthouse_at(self, port: int, name: str, *options: str) -> Process:
        """Start a lighthouse there, and wait until it listens."""
        command = [
            sys.executable, "-m", "ft_core.lighthouse", "--bind", f"{self.host}:{port}", "--liveness-ms", "1000",
            *options,
        ]  # fmt: skip
        process = self._start(name, self.placed(name, command), self.env, None)
        process.wait_for(lambda: bool(process.lines), "said that it listens")
        return process

    def start(self, name: str, **env: object) -> Process:
        """Start (or restart) a trainer."""
        return self.start_command(name, [sys.executable, "-u", WORKER], **env)

    def start_command(self, name: str, command: list[str], **env: object) -> Process:
        """The same with another command, for example a launcher: python -u SCRIPT (or -m LAUNCHER) ...

        From the forge, if there is one; what a launcher starts, too."""
        mine = {
            "PYTHONPATH": str(ROOT),
            "FT_LIGHTHOUSE": f"{self.host}:{self.port}",
            "FT_REPLICA_ID": name,
            "FT_HOSTNAME": self.host,
            "OMP_NUM_THREADS": "1",
            "STEPS_FILE": str(self._end),
        }
        whole = mine | self.env | {key: str(value) for key, value in env.items()}
        process = self._start(name, self.placed(name, command), whole, self.forge)
        self.trainers[name] = process
        return process

    def placed(self, name: str, command: list[str]) -> list[str]:
        """The command that starts `command` where the process `name` belongs."""
        return command

    def start_proxy(self) -> Process:
        """Start (or restart) a proxy in front of the lighthouse, on this cluster's `proxy_port`."""
        command = [sys.executable, "-u", PROXY, str(self.proxy_port), f"{self.host}:{self.port}"]
        proxy = self._start("proxy", command, {}, None)
        proxy.wait_for(lambda: bool(proxy.lines), "said that it listens")
        return proxy

    def kill(self, name: str) -> Process:
        """SIGKILL a trainer."""
        process = self.trainers.pop(name)
        process.signal(signal.SIGKILL)
        process.popen.wait(WAIT_S)
        return process

    def end_at(self, step: int) -> None:
        """Let all trainers train to `step`, which must be ahead of them all."""
        partial = self._end.with_suffix(".tmp")
        partial.write_text(str(step))
        partial.rename(self._end)

    def drain(self, name: str) -> Process:
        """SIGTERM a trainer, and wait until it has ended well."""
        process = self.trainers.pop(name)
        process.signal(signal.SIGTERM)
        code = process.popen.wait(WAIT_S)
        assert code == 0, f"{name} exited with {code}:\n" + "\n".join(process.errors[-25:])
        return process

    def wait_ends(self) -> set[str]:
        """Let all trainers go on for a while, end well, and check the whole run; returns their digests."""
        last = max(p.step() for p in self.trainers.values()) + END_AFTER
        self.end_at(last)
        digests = {process.wait_end() for process in list(self.trainers.values())}
        self.check_commits(last)
        return digests

    def check_commits(self, steps: int) -> None:
        """Every step was committed, with one history; no process repeated a step.

        A process may jump: a kill can leave survivors with different verdicts, and the one behind then heals over
        the step.
        """
        histories: dict[int, set[str]] = {}
        for process in self.processes:
            rows = process.commits()
            numbers = [row[1] for row in rows]
            assert all(b > a for a, b in itertools.pairwise(numbers)), f"{process.name}: {numbers}"
            for _, step, _, lineage in rows:
                histories.setdefault(step, set()).add(lineage)
        assert sorted(histories) == list(range(1, steps + 1))
        forked = {step: found for step, found in histories.items() if len(found) > 1}
        assert not forked, f"committed with different histories: {forked}"

    def _start(self, name: str, command: list[str], env: dict[str, str], forge: Forge | None) -> Process:
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        popen: subprocess.Popen[bytes] | Forged
        try:
            if forge is not None:
                popen = forge.start(command, os.environ | env, to_out, to_err, str(ROOT), launches="-m" in command)
            else:
                popen = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=to_out, stderr=to_err)
        finally:
            os.close(to_out)
            os.close(to_err)
        process = Process(name, popen, (open(out), open(err)), self.changed)  # noqa: SIM115 - closed by __exit__
        self.processes.append(process)
        process.readers = [
            threading.Thread(target=read, args=(process,), daemon=True) for read in (_read, _read_errors)
        ]
        for reader in process.readers:
            reader.start()
        return process


def gap_s(process: Process, around: float) -> float:
    """The longest pause between two commits of a process that touches the time from `around` on."""
    times = [row[0] for row in process.commits()]
    pauses = [b - a for a, b in itertools.pairwise(times) if b >= around]
    return max(pauses, default=0.0)


def _read(process: Process) -> None:
    for line in process.pipes[0]:
        with process.changed:
            process.lines.append((time.monotonic(), line.rstrip()))
            process.changed.notify_all()
    process.popen.wait()
    with process.changed:
        process.changed.notify_all()


def _read_errors(process: Process) -> None:
    for line in process.pipes[1]:
        with process.changed:
            process.errors.append(line.rstrip())
            process.changed.notify_all()
