"""ftrun: a group killed until the job is at full strength again, its own cost, and the start of a job.

Restart: a job of three groups, `kill -9` of each in turn, from the kill to the newcomer's first commit with three
participants; with a warm standby (ready before the kill) and without. Beside every cold kill the same script is started
alone, in the same job's presence, up to the Manager: what its imports take here and now. Cost: eight groups of a
program that sleeps, processor time of ftrun and its keeper over `IDLE_S`, and torchrun's with the same eight. Start:
four groups, from the moment the last of them has imported everything to the first commit with four participants, and
the same four started by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from benchmarks.common import ROOT, BenchmarkError, Child, Job, Options, Record, Row, median, spread, tail

WORKER = "benchmarks/ftrun_worker.py"
GROUPS = 3
STAGES = ("begin", "imported", "built", "manager", "back")
IDLE_GROUPS = 8
IDLE_S = 20.0
STARTED_GROUPS = 4
TICKS = os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- processes, as /proc sees them


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; [] if it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def cpu_s(pid: int) -> float:
    """Processor time of the process itself."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def memory_mb(pid: int) -> tuple[float, float]:
    """(resident, proportional)"""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    return int(kb["Rss"]) / 1e3, int(kb["Pss"]) / 1e3


def children_of(pid: int) -> dict[int, str]:
    """Command lines of its children."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat(int(entry.name))) and int(fields[1]) == pid:
            found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


# ---------------------------------------------------------------- a job under ftrun


class Launched(Job):
    """A job that ftrun runs; `records` are its workers', by group, oldest first."""

    def __init__(
        self, options: Options, groups: int, *flags: str, script: tuple[str, ...] = (WORKER,), **env: str
    ) -> None:
        super().__init__("ftrun", options)
        self.records: dict[int, list[Record]] = {group: [] for group in range(groups)}
        self.launcher = self.start(
            "ftrun", ["ft_core.launch", "--replicas", str(groups), "--max-restarts", "1000", *flags, *script],
            BENCH_NOTES=str(self.folder / "worker-{group}-{pid}"), **env,
        )  # fmt: skip
        self.trainers[0] = self.launcher  # `wait` fails if it ends

    def look(self) -> None:
        """Read what the workers noted since."""
        known = {record.notes for records in self.records.values() for record in records}
        for path in sorted(self.folder.glob("worker-*"), key=lambda p: p.stat().st_mtime):
            if path not in known:
                group = int(path.name.split("-")[1])
                self.records[group].append(Record(path.name, path))
        for records in self.records.values():
            for record in records:
                record.read()

    def pid(self, group: int) -> int:
        """Of the group's newest worker."""
        return int(self.records[group][-1].name.split("-")[2])

    def wait_full(self, commits: int = 20) -> None:
        """Until every group's newest worker has committed that often with everybody in a row."""
        count = len(self.records)

        def full() -> bool:
            self.look()
            newest = [records[-1].commits[-commits:] for records in self.records.values() if records]
            return len(newest) == count and all(
                len(recent) == commits and all(n == count for _, _, n in recent) for recent in newest
            )

        self.wait(full, f"{commits} steps with {count} participants")

    def wait_standby(self) -> None:
        """Until a standby process has imported everything."""

        def ready() -> bool:
            said = self.launcher.log.read_text()
            return len(re.findall(r"\[standby\] \d+ ready", said)) > said.count("from a warm standby")

        self.wait(ready, "a standby process")

    def drain(self) -> int:
        """SIGTERM; returns how many workers are left behind."""
        self.look()
        self.launcher.process.send_signal(signal.SIGTERM)
        self.wait(lambda: self.launcher.process.poll() is not None, "ftrun to drain the job")
        return sum(bool(stat(int(r.name.split("-")[2]))) for records in self.records.values() for r in records)


def notes_of(record: Record) -> dict[str, float]:
    """When it reached each stage."""
    return {event.kind: event.at for event in record.events}


# ---------------------------------------------------------------- restart


def kill(job: Launched, group: int, *, warm: bool) -> dict[str, float]:
    """Kill the group's worker: seconds from then until each stage of the new one."""
    job.wait_full()
    if warm:
        job.wait_standby()
    count = len(job.records[group])
    at = time.monotonic()
    os.kill(job.pid(group), signal.SIGKILL)

    def back() -> float:
        job.look()
        records = job.records[group]
        return next(iter(records[-1].since(at, GROUPS)), 0.0) if len(records) > count else 0.0

    job.wait(back, "the killed group to train again")
    pid = job.pid(group)
    if (f"standby (pid {pid})" in job.launcher.log.read_text()) != warm:
        raise BenchmarkError(f"ftrun started pid {pid} {'cold' if warm else 'warm'}:\n{tail(job.launcher.log)}")
    stages = notes_of(job.records[group][-1]) | {"back": back()}
    return {stage: stages[stage] - at for stage in STAGES}


def alone(folder: pathlib.Path) -> dict[str, float]:
    """The script's own start, without ftrun: seconds from the start of the process until each stage."""
    notes = folder / "alone"
    notes.unlink(missing_ok=True)
    at = time.monotonic()
    env = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_NOTES": str(notes)}
    subprocess.run([sys.executable, WORKER, "--alone"], cwd=ROOT, env=env, check=True, timeout=60)
    record = Record("alone", notes)
    record.read()
    return {stage: when - at for stage, when in notes_of(record).items()}


def breakdown(kills: list[dict[str, float]]) -> str:
    """Median time from each stage to the next, in ms."""
    parts = [
        f"{after} +{median([k[after] - k.get(before, 0.0) for k in kills]) * 1e3:.0f}"
        for before, after in itertools.pairwise(("kill", *STAGES))
    ]
    return f"ms: {', '.join(parts)}"


def restart(options: Options) -> list[Row]:
    """`runs` jobs of each kind, three kills each."""
    warm: list[dict[str, float]] = []
    cold: list[dict[str, float]] = []
    own: list[dict[str, float]] = []
    left = 0
    for _ in range(options.runs):
        with Launched(options, GROUPS, "--standby", "1") as job:
            warm += [kill(job, group, warm=True) for group in range(GROUPS)]
            left += job.drain()
        with Launched(options, GROUPS) as job:
            for group in range(GROUPS):
                job.wait_full()
                own.append(alone(job.folder))
                cold.append(kill(job, group, warm=False))
            left += job.drain()
    warm_s, cold_s = ([k["back"] for k in kills] for kills in (warm, cold))
    imports, built = ([o[stage] for o in own] for stage in ("imported", "built"))
    extra = [c - i for c, i in zip(cold_s, imports, strict=True)]
    less = median([c - b for c, b in zip(cold_s, built, strict=True)])
    return [
        Row("ftrun", "group killed: full strength, warm standby", median(warm_s), "s", "<= 0.5 s",
            median(warm_s) <= 0.5, f"{spread(warm_s, ' s', 2)}; {breakdown(warm)}", tuple(warm_s)),
        Row("ftrun", "group killed: full strength, cold", median(cold_s), "s", "", None,
            f"{spread(cold_s, ' s', 2)}; {breakdown(cold)}", tuple(cold_s)),
        Row("ftrun", "the script alone: until imported", median(imports), "s", "", None,
            f"{spread(imports, ' s', 2)}; until its optimizer is built (torch imports torch._dynamo for it) "
            f"{median(built):.2f} s",
            tuple(imports)),
        Row("ftrun", "cold, less the script's imports", median(extra), "s", "<= 1 s", median(extra) <= 1.0,
            f"{spread(extra, ' s', 2)}; less the imports for its optimizer too {less:.2f} s", tuple(extra)),
        Row("ftrun", "workers left behind after SIGTERM", str(left), "", "0", left == 0),
    ]  # fmt: skip


# ---------------------------------------------------------------- cost


def idle(options: Options, command: list[str]) -> dict[str, float]:
    """Processor time and memory of a launcher (with its keeper) whose workers sleep."""
    with Job("ftrun", options) as job:
        launcher = job.start("launcher", [*command, "--no-python", "sleep", "600"])
        job.trainers[0] = launcher
        pid = launcher.process.pid

        def workers() -> list[int]:
            return [p for p, line in children_of(pid).items() if line.startswith("sleep ")]

        try:
            job.wait(lambda: len(workers()) == IDLE_GROUPS, f"{IDLE_GROUPS} workers")
            time.sleep(2.0)
            pids = [pid, *(children_of(pid).keys() - set(workers()))]
            before, at = sum(map(cpu_s, pids)), time.monotonic()
            time.sleep(IDLE_S)
            used, took = sum(map(cpu_s, pids)) - before, time.monotonic() - at
            memory = [memory_mb(p) for p in pids]
        finally:
            end(launcher, workers())
        return {
            "percent": 100 * used / took, "rss": sum(m[0] for m in memory), "pss": sum(m[1] for m in memory),
            "processes": len(pids),
        }  # fmt: skip


def end(launcher: Child, workers: list[int]) -> None:
    """SIGTERM, and what that leaves is killed: torchrun's workers would outlive it."""
    launcher.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.process.wait(45)
    for pid in workers:
        if stat(pid):
            os.kill(pid, signal.SIGKILL)


def cost(options: Options) -> list[Row]:
    """ftrun and torchrun in turn."""
    ours, theirs = [], []
    for _ in range(options.runs):
        ours.append(idle(options, ["ft_core.launch", "--replicas", str(IDLE_GROUPS)]))
        theirs.append(idle(options, ["torch.distributed.run", "--standalone", "--nproc-per-node", str(IDLE_GROUPS)]))

    def both(name: str, found: list[dict[str, float]], promise: bool) -> list[Row]:
        percent, rss, pss = ([f[key] for f in found] for key in ("percent", "rss", "pss"))
        processes = f"{found[0]['processes']:.0f} process{'es' if found[0]['processes'] > 1 else ''}"
        return [
            Row("ftrun", f"{name}, {IDLE_GROUPS} idle workers: of one core", median(percent), "%",
                "<= 3 %" if promise else "", median(percent) <= 3.0 if promise else None,
                f"over {IDLE_S:g} s; {spread(percent, ' %', 2)}", tuple(percent)),
            Row("ftrun", f"{name}, {IDLE_GROUPS} idle workers: resident", median(rss), "MB",
                "<= 280 MB" if promise else "", median(rss) <= 280 if promise else None,
                f"{processes}; proportional share {median(pss):.0f} MB", tuple(rss)),
        ]  # fmt: skip

    return both("ftrun", ours, promise=True) + both("torchrun", theirs, promise=False)


# ---------------------------------------------------------------- start


def first_commit(records: list[Record], asked: float) -> dict[str, float]:
    """Seconds from each moment (the last worker's) to the first commit of everybody."""
    common = min(record.since(0.0, len(records))[0] for record in records)
    stages = [notes_of(record) for record in records]
    return {"asked": common - asked} | {s: common - max(n[s] for n in stages) for s in ("imported", "built", "manager")}


def launched(options: Options) -> dict[str, float]:
    """Four groups, started by ftrun."""
    asked = time.monotonic()
    with Launched(options, STARTED_GROUPS) as job:
        job.wait_full(5)
        found = first_commit([records[0] for records in job.records.values()], asked)
        job.drain()
        return found


def by_hand(options: Options) -> dict[str, float]:
    """The same four, started one by one beside a lighthouse."""
    asked = time.monotonic()
    with Job("ftrun", options) as job:
        job.start_lighthouse()
        for group in range(STARTED_GROUPS):
            job.trainers[group] = job.start(
                f"r{group}", ["benchmarks.ftrun_worker"], FT_LIGHTHOUSE=job.address, FT_REPLICA_ID=f"r{group}",
                FT_REPLICA_GROUP=str(group), FT_NUM_REPLICA_GROUPS=str(STARTED_GROUPS), FT_HOSTNAME="127.0.0.1",
            )  # fmt: skip
        job.wait_settled(STARTED_GROUPS, steps=5)
        return first_commit(list(job.trainers.values()), asked)


def start(options: Options) -> list[Row]:
    """ftrun and by hand in turn."""
    found, hand = [], []
    for _ in range(options.runs):
        found.append(launched(options))
        hand.append(by_hand(options))
    rows = []
    for name, runs, promise in (("ftrun", found, True), ("by hand", hand, False)):
        imported, built, manager, whole = ([r[key] for r in runs] for key in ("imported", "built", "manager", "asked"))
        rows.append(
            Row("ftrun", f"{STARTED_GROUPS} groups, {name}: last import until the first common commit",
                median(imported), "s", "<= 4 s" if promise else "", median(imported) <= 4.0 if promise else None,
                f"{spread(imported, ' s', 2)}; from the last optimizer {median(built):.2f} s, from the last Manager "
                f"{median(manager):.2f} s, from the command {median(whole):.1f} s", tuple(imported))
        )  # fmt: skip
    return rows


def measure(options: Options) -> list[Row]:
    """All of it. What cannot be measured is a row of its own: the rest is."""
    rows: list[Row] = []
    for part in (restart, cost, start):
        try:
            rows += part(options)
        except BenchmarkError as error:
            text = str(error)
            print(f"ftrun, {part.__name__}: {text}", file=sys.stderr, flush=True)
            rows.append(Row("ftrun", f"{part.__name__}: could not be measured", "-", met=False,
                            detail=text.splitlines()[0]))  # fmt: skip
    return rows
