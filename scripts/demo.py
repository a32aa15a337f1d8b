"""Runs the story of scripts/demo and checks its end. Standard library only.

Starts a lighthouse and ftrun, which runs three replica groups of examples/ddp/train.py and keeps a standby process.
Then: SIGKILLs a replica mid-run, SIGKILLs the lighthouse and starts it again two seconds later, and SIGKILLs another
replica to show that membership changes work again. Starting replicas again is ftrun's business. At the end ft-report
says where every second went, and draws it into demo-out/. All that was started is ended by its id, whatever happens.
Exit code 0 only if ftrun says so, the three digests are equal and every step was committed exactly once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = 3
KILLS = 2
LIMIT_S = 300.0
REPORT_S = 60.0


@dataclass(frozen=True)
class Commit:
    """One committed step, as one process saw it."""

    at: float
    """Wall clock, seconds."""
    step: int
    participants: int
    lineage: str


@dataclass(frozen=True)
class Worker:
    """One start of a group, of which ftrun spoke."""

    group: int
    pid: int
    how: str
    log: pathlib.Path

    def commits(self) -> list[Commit]:
        """What it has committed so far."""
        rows = [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [Commit(float(r[0]), int(r[1]), int(r[2]), r[3]) for r in rows if len(r) == 4]


class Demo:
    """The cast, the clock and the timeline."""

    def __init__(self, steps: int, folder: pathlib.Path) -> None:
        self.steps = steps
        self.folder = folder
        self.started = time.time()
        self.processes: list[subprocess.Popen[str]] = []
        self.workers: list[Worker] = []
        self.digests: dict[int, str] = {}
        self.events = str(folder / "events")
        self.warm = 0
        """Standby processes that were ready."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.lighthouse_at = f"127.0.0.1:{probe.getsockname()[1]}"

    def say(self, text: str) -> None:
        """One line of the timeline."""
        print(f"{time.time() - self.started:6.2f} s  {text}", flush=True)

    # ------------------------------------------------------------ processes

    def start(self, module: str, *arguments: str, hear: Callable[[str], None] | None = None) -> subprocess.Popen[str]:
        """Start a process; a thread writes its lines to a file and passes them on."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.processes.append(process)
        log = self.folder / f"{module}-{process.pid}.log"

        def collect() -> None:
            assert process.stdout is not None
            with log.open("w") as file:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    if hear is not None:
                        hear(line)

        threading.Thread(target=collect, daemon=True).start()
        return process

    def start_lighthouse(self) -> subprocess.Popen[str]:
        """Start it (again), on the demo's port."""
        process = self.start("ft_core.lighthouse", "--bind", self.lighthouse_at, "--events", self.events)
        self.say(f"lighthouse started on {self.lighthouse_at} (pid {process.pid})")
        return process

    def start_training(self) -> None:
        """Start ftrun with three groups."""
        training = ("examples/ddp/train.py", "--steps", str(self.steps))
        log = ("--commit-log", str(self.folder / "commits-{group}-{pid}"))
        options = ("--replicas", str(GROUPS), "--standby", "1", "--lighthouse", self.lighthouse_at)
        self.ftrun = self.start("ft_core.launch", *options, "--events", self.events, *training, *log, hear=self.hear)
        self.say(f"ftrun {' '.join((*options, *training))}")

    def hear(self, line: str) -> None:
        """A line of ftrun or of one of its workers."""
        if found := re.match(r"ftrun: \[replica-(\d+)\] started (from a warm standby )?\(pid (\d+)\)", line):
            group, pid = int(found[1]), int(found[3])
            how = "from a warm standby" if found[2] else "cold"
            self.workers.append(Worker(group, pid, how, self.folder / f"commits-{group}-{pid}"))
            self.say(f"replica-{group} started {how} (pid {pid})")
        elif re.match(r"ftrun: \[standby\] \d+ ready", line):
            self.warm += 1
        elif found := re.match(r"\[replica-(\d+)/0\] done: .* digest (\w+)", line):
            self.digests[int(found[1])] = found[2]
        elif found := re.search(r"\[(replica-\d+)/0\].*(healed to step [1-9].*|prefetched .* of live state)", line):
            self.say(f"    {found[1]} {found[2]}")

    def end(self) -> None:
        """End everything by its id; the workers go with ftrun."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    # ------------------------------------------------------------ the story

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition()`; fails if the training ended before, or the time is over."""
        while not condition():
            if self.ftrun.poll() is not None:
                raise SystemExit(f"the training ended before {what} (status {self.ftrun.poll()}); logs: {self.folder}")
            if time.time() - self.started > LIMIT_S:
                raise SystemExit(f"gave up waiting for {what}; logs: {self.folder}")
            time.sleep(0.02)

    def newest(self) -> dict[int, Worker]:
        """The running process of each group."""
        return {worker.group: worker for worker in self.workers}

    def step(self) -> int:
        """The newest step that anyone has committed."""
        return max((c[-1].step for w in self.newest().values() if (c := w.commits())), default=0)

    def train(self, steps: int) -> None:
        """Wait until so many more are committed by all groups, and report the pace."""
        goal = self.step() + steps

        def reached() -> bool:
            last = [c[-1] for w in self.newest().values() if (c := w.commits())]
            return len(last) == GROUPS and all(c.step >= goal and c.participants == GROUPS for c in last)

        self.wait(reached, f"step {goal} with {GROUPS} members")
        rows = max((worker.commits() for worker in self.newest().values()), key=len)
        self.say(f"step {rows[-1].step}: {rows[-1].participants} members, {normal(rows) * 1e3:.0f} ms per step")

    def kill_replica(self, group: int) -> None:
        """kill -9; report how long the survivors stood still, and when all were there again."""
        self.wait(lambda: self.warm > sum(w.how != "cold" for w in self.workers), "a standby process was ready")
        before = self.newest()
        at, step = time.time(), self.step()
        os.kill(before[group].pid, signal.SIGKILL)
        self.say(f"kill -9 replica-{group} (pid {before[group].pid}) at step {step}")

        def full() -> list[float]:
            worker = self.newest()[group]
            return [c.at for c in worker.commits() if c.participants == GROUPS] if worker != before[group] else []

        self.wait(full, f"replica-{group} was back")
        self.say(f"    {GROUPS} members again {full()[0] - at:.2f} s after the kill")
        for other, worker in before.items():
            if other != group:
                rows = [c for c in worker.commits() if c.at <= full()[0]]
                usual = normal([c for c in rows if c.at < at])
                longest = max(b.at - a.at for a, b in itertools.pairwise(rows) if b.at > at)
                self.say(f"    replica-{other}: longest step {longest * 1e3:.0f} ms, usual {usual * 1e3:.0f} ms")

    def finish(self) -> int:
        """Wait for the end and check it. Returns the exit code."""
        left = LIMIT_S - (time.time() - self.started)
        try:
            status = self.ftrun.wait(max(1.0, left))
        except subprocess.TimeoutExpired:
            raise SystemExit(f"gave up waiting for the end; logs: {self.folder}") from None
        self.say(f"ftrun ended with status {status}")
        time.sleep(0.2)
        print()
        for group, digest in sorted(self.digests.items()):
            print(f"  replica-{group}  digest {digest}")
        problems = self.check_commits()
        if status != 0:
            problems.append(f"ftrun's exit status is {status}")
        if len(self.digests) != GROUPS or len(set(self.digests.values())) != 1:
            problems.append("the digests differ, or some are missing")
        if len(self.workers) != GROUPS + KILLS:
            problems.append(f"{len(self.workers)} processes were started, not {GROUPS + KILLS}: one died unasked")
        for problem in problems:
            print(f"  PROBLEM: {problem}")
        if problems:
            print(f"\nFAILED. Logs are in {self.folder}")
            return 1
        print(f"\nAll three models are bit-identical, and each of the {self.steps} steps was committed exactly once.")
        return 0

    def report(self) -> None:
        """Where every second went, as text and as a picture."""
        print("\nft-report says of it:\n", flush=True)
        command = [sys.executable, "-m", "ft_core.report.cli", self.events, "--out", str(ROOT / "demo-out")]
        subprocess.run(command, cwd=ROOT, timeout=REPORT_S, check=True)

    def check_commits(self) -> list[str]:
        """Every step of the run was committed, once, with one history; no process repeated a step.

        (One may jump over a step: a kill can leave survivors with different verdicts, and the one behind then heals.)
        """
        problems = []
        histories: dict[int, set[str]] = {}
        for worker in self.workers:
            rows = worker.commits()
            if any(b.step <= a.step for a, b in itertools.pairwise(rows)):
                problems.append(f"replica-{worker.group} (pid {worker.pid}) repeated a step: see {worker.log}")
            for row in rows:
                histories.setdefault(row.step, set()).add(row.lineage)
        missing = sorted(set(range(1, self.steps + 1)) - set(histories))
        if missing:
            problems.append(f"steps {missing[:10]} were never committed")
        forked = sorted(step for step, lineages in histories.items() if len(lineages) > 1)
        if forked:
            problems.append(f"steps {forked[:10]} were committed more than once, with different histories")
        return problems


def normal(rows: list[Commit]) -> float:
    """Seconds of a usual step: the median of the last ones."""
    return statistics.median([b.at - a.at for a, b in itertools.pairwise(rows[-20:])] or [0.0])


def main() -> int:
    """Tell the story; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="length of the training run (at least 300)")
    args = parser.parse_args()
    if args.steps < 300:
        parser.error("--steps must be at least 300, or the run is over before the story is told")
    demo = Demo(args.steps, pathlib.Path(tempfile.mkdtemp(prefix="ft-demo-")))
    try:
        lighthouse = demo.start_lighthouse()
        demo.start_training()
        demo.train(args.steps // 20)
        demo.kill_replica(1)
        demo.train(args.steps // 20)
        before = demo.step()
        lighthouse.kill()
        lighthouse.wait()
        demo.say("kill -9 the lighthouse")
        time.sleep(2.0)
        demo.say(f"    {demo.step() - before} steps were committed without it")
        demo.start_lighthouse()
        demo.train(args.steps // 20)
        demo.kill_replica(2)
        status = demo.finish()
        demo.report()
    finally:
        demo.end()
    if status == 0:  # else its logs are wanted
        shutil.rmtree(demo.folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
