"""Runs the story of scripts/demo and checks its end. Standard library only.

Starts a lighthouse and three replica groups of examples/ddp/train.py, then: SIGKILLs one mid-run and restarts it,
SIGKILLs the
lighthouse and restarts it, and SIGKILLs another replica to show that membership changes work again. Every process is
a child
of this one and is ended by its id, whatever happens. Exit code 0 only if the three digests are equal and every step was
committed exactly once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 300.0


@dataclass
class Child:
    """One process and what it has said."""

    name: str
    process: subprocess.Popen[str]
    commits: pathlib.Path | None = None
    digest: str = ""
    lines: list[str] = field(default_factory=list)
    seen: int = 0

    def steps(self) -> list[tuple[float, int, int, str]]:
        """(wall time, step, participants, lineage) of every commit so far."""
        if self.commits is None or not self.commits.exists():
            return []
        rows = [line.split() for line in self.commits.read_text().splitlines()]
        return [(float(r[0]), int(r[1]), int(r[2]), r[3]) for r in rows if len(r) == 4]


class Demo:
    """The cast, the clock and the timeline."""

    def __init__(self, steps: int, folder: pathlib.Path) -> None:
        self.steps = steps
        self.folder = folder
        self.started = time.time()
        self.children: list[Child] = []
        self.trainers: dict[int, Child] = {}
        self.lighthouse: Child | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    def say(self, text: str) -> None:
        """One line of the timeline."""
        print(f"{time.time() - self.started:6.2f} s  {text}", flush=True)

    def start(self, name: str, command: list[str], env: dict[str, str], commits: pathlib.Path | None = None) -> Child:
        """Start a child; a thread collects its lines."""
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        child = Child(name, process, commits)
        self.children.append(child)
        threading.Thread(target=self._collect, args=(child,), daemon=True).start()
        return child

    def _collect(self, child: Child) -> None:
        assert child.process.stdout is not None
        with (self.folder / f"{child.name}-{child.process.pid}.log").open("w") as log:
            for line in child.process.stdout:
                log.write(line)
                log.flush()
                child.lines.append(line.rstrip())
                if found := re.search(r"digest (\w+)", line):
                    child.digest = found[1]
                if found := re.search(r"healed to step (\d+): (.+) in (\S+) s from (\d+) donors", line):
                    self.say(
                        f"    {child.name} healed to step {found[1]}: {found[2]} in {found[3]} s from {found[4]} donors"
                    )
                if found := re.search(r"prefetched (.+) of live state", line):
                    self.say(f"    {child.name} copied {found[1]} of live state before it joined")

    def start_lighthouse(self) -> None:
        """Start (or restart) the lighthouse on the demo's port."""
        command = [
            sys.executable,
            "-m",
            "ft_core.lighthouse",
            "--bind",
            f"127.0.0.1:{self.port}",
            "--min-replicas",
            "1",
        ]
        self.lighthouse = self.start("lighthouse", command, {})
        self.wait(lambda: self._listening(), "the lighthouse to listen")
        self.say(f"lighthouse listens on port {self.port} (pid {self.lighthouse.process.pid})")

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def start_trainer(self, group: int) -> None:
        """Start (or restart) replica group `group`."""
        count = sum(c.name == f"trainer-{group}" for c in self.children)
        commits = self.folder / f"commits-{group}-{count}"
        command = [sys.executable, "examples/ddp/train.py", "--steps", str(self.steps), "--commit-log", str(commits)]
        env = {
            "FT_LIGHTHOUSE": f"127.0.0.1:{self.port}",
            "FT_REPLICA_ID": f"trainer-{group}",
            "FT_REPLICA_GROUP": str(group),
            "FT_NUM_REPLICA_GROUPS": "3",
            "FT_HOSTNAME": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        self.trainers[group] = self.start(f"trainer-{group}", command, env, commits)
        self.say(f"trainer-{group} started (pid {self.trainers[group].process.pid})")

    def wait(self, condition: object, what: str) -> None:
        """Wait until `condition()`; fails if a trainer died unasked or the time is over."""
        while not condition():  # type: ignore[operator]
            if time.time() - self.started > LIMIT_S:
                raise SystemExit(f"gave up waiting for {what}; logs in {self.folder}")
            for group, child in self.trainers.items():
                if child.process.poll() not in (None, 0):
                    tail = "\n".join(child.lines[-15:])
                    raise SystemExit(f"trainer-{group} exited with {child.process.poll()} unasked:\n{tail}")
            time.sleep(0.01)

    def step(self) -> int:
        """The newest step any trainer has committed."""
        return max((s[-1][1] for c in self.trainers.values() if (s := c.steps())), default=0)

    def wait_step(self, step: int) -> None:
        """Wait until `step` is committed, and report it."""
        self.wait(lambda: self.step() >= step, f"step {step}")
        child = max(self.trainers.values(), key=lambda c: len(c.steps()))
        rows = child.steps()[-20:]
        pace = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(rows)) * 1000
        self.say(f"step {rows[-1][1]}: {rows[-1][2]} members, {pace:.0f} ms per step")

    def kill_trainer(self, group: int) -> None:
        """kill -9, then report how long the survivors stood still."""
        victim = self.trainers.pop(group)
        at = time.time()
        os.kill(victim.process.pid, signal.SIGKILL)
        victim.process.wait()
        self.say(f"kill -9 trainer-{group} at step {self.step()}")
        survivors = list(self.trainers.items())
        base = {g: len([r for r in c.steps() if r[0] <= at]) for g, c in survivors}
        self.wait(lambda: all(len(c.steps()) >= base[g] + 8 for g, c in survivors), "the survivors to go on")
        for g, child in survivors:
            rows = child.steps()
            normal = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(rows))
            around = rows[max(0, base[g] - 1) : base[g] + 8]
            longest = max(b[0] - a[0] for a, b in itertools.pairwise(around))
            self.say(
                f"    trainer-{g} went on with {around[-1][2]} members; longest step {longest * 1000:.0f} ms, "
                f"{(longest - normal) * 1000:.0f} ms beyond a normal one"
            )

    def finish(self) -> int:
        """Wait for the end and check it. Returns the exit code."""
        self.wait(lambda: all(c.process.poll() == 0 for c in self.trainers.values()), "the trainers to finish")
        time.sleep(0.2)
        print()
        for group, child in sorted(self.trainers.items()):
            print(f"  trainer-{group}  digest {child.digest}")
        digests = {c.digest for c in self.trainers.values()}
        problems = self.check_commits()
        if len(digests) != 1 or "" in digests:
            problems.append("the digests differ")
        for problem in problems:
            print(f"  PROBLEM: {problem}")
        if problems:
            print(f"\nFAILED. Logs are in {self.folder}")
            return 1
        print(f"\nAll three models are bit-identical, and each of the {self.steps} steps was committed exactly once.")
        return 0

    def check_commits(self) -> list[str]:
        """Every step of the run was committed, once, with one history; no process repeated a step.

        (One may jump over a step: a kill can leave survivors with different verdicts, and the one behind then heals.)
        """
        problems = []
        histories: dict[int, set[str]] = {}
        for child in self.children:
            rows = child.steps()
            steps = [row[1] for row in rows]
            if any(b <= a for a, b in itertools.pairwise(steps)):
                problems.append(f"{child.name} repeated a step: {steps}")
            for _, step, _, lineage in rows:
                histories.setdefault(step, set()).add(lineage)
        missing = sorted(set(range(1, self.steps + 1)) - set(histories))
        if missing:
            problems.append(f"steps {missing[:10]} were never committed")
        forked = sorted(step for step, lineages in histories.items() if len(lineages) > 1)
        if forked:
            problems.append(f"steps {forked[:10]} were committed more than once, with different histories")
        return problems

    def end(self) -> None:
        """End every child by its id."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()


def main() -> int:
    """Tell the story; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="length of the training run (at least 300)")
    args = parser.parse_args()
    if args.steps < 300:
        parser.error("--steps must be at least 300, or the run is over before the story is told")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ft-demo-"))
    demo = Demo(args.steps, folder)
    tenth = args.steps // 20
    try:
        demo.start_lighthouse()
        for group in range(3):
            demo.start_trainer(group)
        demo.wait_step(tenth)
        demo.kill_trainer(1)
        demo.start_trainer(1)
        demo.wait(lambda: bool(demo.trainers[1].steps()), "trainer-1 to return")
        demo.say(f"    trainer-1 is back and committed step {demo.trainers[1].steps()[0][1]}")
        demo.wait_step(demo.step() + tenth)
        assert demo.lighthouse is not None
        before = demo.step()
        demo.lighthouse.process.kill()
        demo.lighthouse.process.wait()
        demo.say("kill -9 the lighthouse")
        time.sleep(2.0)
        demo.say(f"    {demo.step() - before} steps were committed without it")
        demo.start_lighthouse()
        demo.wait_step(demo.step() + tenth // 2)
        demo.kill_trainer(2)
        demo.start_trainer(2)
        demo.wait(lambda: bool(demo.trainers[2].steps()), "trainer-2 to return")
        demo.say(f"    trainer-2 is back and committed step {demo.trainers[2].steps()[0][1]}")
        return demo.finish()
    finally:
        demo.end()


if __name__ == "__main__":
    sys.exit(main())
