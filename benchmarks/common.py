"""What all figures share: processes that are always ended, what they noted, statistics, rows of the table.

How it works. A `Job` is a folder of files, a lighthouse and some replica processes (`trainer.py`). A replica appends a
line per event to a file, with `time.monotonic()`, which is one clock for all processes of a machine; the parent reads
these files now and then (rarely: there are few cores, and it must not disturb what it measures).
Standard library only. Every wait has a limit, every process is ended by its id when the `Job` ends.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import pathlib
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

ROOT = pathlib.Path(__file__).resolve().parent.parent
POLL_S = 0.05


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    runs: int = 5
    """Repetitions of each measurement; medians are over these."""
    kills: int = 50
    keep: bool = False
    """Keep the folders with logs and events."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    figure: str
    what: str
    value: float | str
    unit: str = ""
    target: str = ""
    met: bool | None = None
    """None: nothing was promised."""
    detail: str = ""
    samples: tuple[float, ...] = ()
    """What the value was computed from."""

    def as_json(self) -> dict[str, object]:
        """All fields, samples rounded."""
        return asdict(self) | {"samples": [round(s, 6) for s in self.samples]}


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def median(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return statistics.median(values) if values else float("nan")


def spread(values: Sequence[float], unit: str = "", digits: int = 1) -> str:
    """Lowest and highest, for a detail column."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}{unit}, n={len(values)}" if values else "n=0"


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| figure | what | measured | target | | detail |", "|---|---|---:|---|---|---|"]
    for row in rows:
        value = f"{row.value:.3g}" if isinstance(row.value, float) and abs(row.value) < 100 else row.value
        value = f"{row.value:.0f}" if isinstance(row.value, float) and abs(row.value) >= 100 else value
        mark = {True: "ok", False: "**missed**", None: ""}[row.met]
        lines.append(f"| {row.figure} | {row.what} | {value} {row.unit} | {row.target} | {mark} | {row.detail} |")
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        cpu = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line), cpu)
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    versions = {}
    for name in ("torch", "grpcio", "protobuf", "torchft-nightly"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), **versions, "date": datetime.now(timezone.utc).isoformat("T", "seconds"),
        "commit": commit.stdout.strip() + ("+" if dirty.stdout.strip() else ""), "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip


# ---------------------------------------------------------------- what a replica noted


@dataclass(frozen=True)
class Event:
    """One line of a replica's notes."""

    at: float
    kind: str
    text: str


@dataclass
class Record:
    """What one process has noted."""

    name: str
    notes: pathlib.Path
    events: list[Event] = field(default_factory=list)
    """Everything but commits."""
    commits: list[tuple[float, int, int]] = field(default_factory=list)
    """(monotonic s, step, participants)"""
    _offset: int = 0

    def read(self) -> Self:
        """Take in what was noted since."""
        with contextlib.suppress(FileNotFoundError), self.notes.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._offset += len(data)
            for line in data.decode().splitlines():
                at, kind, text = line.split(" ", 2)
                if kind == "commit":
                    step, participants = text.split()
                    self.commits.append((float(at), int(step), int(participants)))
                else:
                    self.events.append(Event(float(at), kind, text))
        return self

    def between(self, start: float, end: float, *kinds: str) -> list[Event]:
        """Events of these kinds in [start, end]."""
        return [e for e in self.events if start <= e.at <= end and e.kind in kinds]

    def intervals(self, start: float, end: float) -> list[float]:
        """Seconds between commits, for every interval that touches [start, end]."""
        first = max(0, bisect.bisect_right(self.commits, (start, 0, 0)) - 1)
        last = bisect.bisect_left(self.commits, (end, 0, 0)) + 1
        return [b[0] - a[0] for a, b in itertools.pairwise(self.commits[first:last])]

    def since(self, at: float, participants: int) -> list[float]:
        """When it committed with that many participants, after `at`."""
        return [t for t, _, n in self.commits[bisect.bisect_right(self.commits, (at, 0, 0)) :] if n == participants]

    def beyond_normal(self, start: float, end: float) -> float:
        """Longest interval that touches [start, end], less the median step since a second before."""
        return max(self.intervals(start, end), default=float("inf")) - median(self.intervals(start - 1.0, end))

    @property
    def last_step(self) -> int:
        """Newest step it has committed."""
        return self.commits[-1][1] if self.commits else 0


@dataclass
class Child(Record):
    """One process that was started here, and its notes."""

    process: subprocess.Popen[bytes] = field(kw_only=True)
    log: pathlib.Path = field(kw_only=True)

    def say(self, text: str) -> None:
        """One line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()


# ---------------------------------------------------------------- processes


class Job:
    """A lighthouse and replicas in a folder of their own; a context manager that ends them all."""

    def __init__(self, name: str, options: Options, lighthouse: Sequence[str] = (), min_replicas: int = 1) -> None:
        self.options = options
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"ft-bench-{name}-"))
        self.children: list[Child] = []
        self.trainers: dict[int, Child] = {}
        self.trainer_flags: tuple[str, ...] = ()
        """Of every trainer, before its own."""
        self.trainer_env: dict[str, str] = {}
        self._flags = ["--min-replicas", str(min_replicas), *lighthouse]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)  # its workers too: they may outlive it
            child.process.wait()
            assert child.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.process.stdin.close()
        if self.options.keep or (error is not None and not isinstance(error, KeyboardInterrupt)):
            print(f"logs and events are in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Of the lighthouse."""
        return f"127.0.0.1:{self.port}"

    def start(self, name: str, command: Sequence[str], **env: str) -> Child:
        """Start a process in a group of its own; its output goes to a file."""
        stem = f"{name}-{sum(c.name == name for c in self.children)}"
        log, notes = self.folder / f"{stem}.log", self.folder / f"{stem}.events"
        threads = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        variables = os.environ | threads | {"BENCH_NOTES": str(notes)} | env
        variables.pop("BENCH_NOTES") if name == "lighthouse" else None
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        child = Child(name, notes, process=process, log=log)
        self.children.append(child)
        return child

    def start_lighthouse(self) -> tuple[Child, float]:
        """Start it on the job's port; the child, and when (monotonic s) it listened."""
        child = self.start("lighthouse", ["ft_core.lighthouse", "--bind", self.address, *self._flags])
        deadline = time.monotonic() + 10.0
        while child.process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return child, time.monotonic()
            time.sleep(0.005)
        raise SystemExit(f"the lighthouse did not start:\n{tail(child.log)}")

    def start_trainer(self, group: int, *flags: str, **env: str) -> Child:
        """Start (or start again) replica `group`."""
        variables = {
            "FT_LIGHTHOUSE": self.address,
            "FT_REPLICA_ID": f"r{group}",
            "FT_REPLICA_GROUP": str(group),
            "FT_HOSTNAME": "127.0.0.1",
        }
        child = self.start(
            f"r{group}", ["benchmarks.trainer", *self.trainer_flags, *flags], **(variables | self.trainer_env | env)
        )
        self.trainers[group] = child
        return child

    def kill(self, child: Child) -> tuple[float, float]:
        """kill -9; when (monotonic s) it was sent and when the kernel had ended the process."""
        self.trainers = {group: c for group, c in self.trainers.items() if c is not child}
        at = time.monotonic()
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        return at, time.monotonic()

    def wait(self, condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
        """Poll until `condition()`; raises if a trainer died unasked or the limit passed."""
        deadline = time.monotonic() + limit_s
        while True:
            for child in self.trainers.values():
                child.read()
                if child.process.poll() not in (None, 0):
                    last = tail(child.log, 1)
                    raise BenchmarkError(f"{child.name} ended with {child.process.poll()}: {last}; see {child.log}")
            if condition():
                return
            if time.monotonic() > deadline:
                state = "; ".join(f"{c.name} at step {c.last_step}" for c in self.trainers.values())
                raise BenchmarkError(f"waited {limit_s:g} s for {what} ({state}); logs in {self.folder}")
            time.sleep(POLL_S)

    def wait_settled(self, participants: int, steps: int = 300, limit_s: float = 60.0) -> None:
        """Until every trainer's last `steps` commits were all made by `participants` of them."""

        def settled() -> bool:
            recent = [c.commits[-steps:] for c in self.trainers.values()]
            return all(len(r) == steps and all(n == participants for _, _, n in r) for r in recent)

        self.wait(settled, f"{steps} steps with {participants} participants", limit_s)

    def wait_went_on(self, after: float, participants: int, steps: int = 20, limit_s: float = 60.0) -> float:
        """Until every trainer committed `steps` with that many participants since `after`; returns when that was."""
        children = list(self.trainers.values())
        self.wait(
            lambda: all(len(c.since(after, participants)) >= steps for c in children),
            f"{participants} to go on",
            limit_s,
        )
        return max(c.since(after, participants)[steps - 1] for c in children)

    def finish(self, ahead: int = 500) -> set[str]:
        """Let all trainers stop at the same step; returns their digests (one, if all is well)."""
        goal = max(c.read().last_step for c in self.trainers.values()) + ahead
        for child in self.trainers.values():
            child.say(f"finish {goal}")
        self.wait(lambda: all(c.process.poll() == 0 for c in self.trainers.values()), "the trainers to finish")
        return {e.text for c in self.trainers.values() for e in c.read().events if e.kind == "digest"}


class BenchmarkError(Exception):
    """A measurement could not be made; its text says why and where the logs are."""


def tail(path: pathlib.Path, lines: int = 20) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


@contextlib.contextmanager
def started(
    name: str, options: Options, trainers: int, *flags: str, lighthouse: Sequence[str] = (), **env: str
) -> Iterator[Job]:
    """A job with a lighthouse and that many trainers, ended afterwards."""
    with Job(name, options, lighthouse, min_replicas=1) as job:
        job.start_lighthouse()
        for group in range(trainers):
            job.start_trainer(group, *flags, **env)
        yield job
