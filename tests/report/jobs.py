"""Jobs that never ran: their events, written down by hand or drawn by a seed, for the pure part of the report."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from ft_core.events.schema import FTRUN, KINDS, LIGHTHOUSE, REPLICA, VERSION, lacks
from ft_core.report.reader import Found, Log

if TYPE_CHECKING:
    import pathlib

Event = dict[str, Any]


def event(t: float, kind: str, **fields: Any) -> Event:
    """One event, which has to be of the schema; as older files of this version it may lack what was added since."""
    made = {"t": t, "kind": kind, **fields}
    assert lacks(made) == ""
    assert set(fields) <= set(KINDS[kind].fields)
    return made


class Job:
    """Collects the events of a job by who wrote them; its clock is seconds from 0."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, str, int], list[Event]] = {}

    def write(self, role: str, source: str, t: float, kind: str, process: int = 1, /, **fields: Any) -> None:
        self.logs.setdefault((role, source, process), []).append(event(t, kind, **fields))

    def lighthouse(self, t: float, kind: str, **fields: Any) -> None:
        room = {} if kind in ("stood_still", "lighthouse_started", "pair") else {"room": "default"}
        self.write(LIGHTHOUSE, "lighthouse", t, kind, 1, **room, **fields)

    def ftrun(self, t: float, kind: str, **fields: Any) -> None:
        self.write(FTRUN, "ftrun", t, kind, 1, **fields)

    def replica(self, name: str, t: float, kind: str, pid: int = 1, **fields: Any) -> None:
        self.write(REPLICA, name, t, kind, pid, **fields)

    # ------------------------------------------------------------ what often comes together

    def joins(self, name: str, t: float, quorum_id: int, *, pid: int = 1, step: int = 0, heals: bool = False,
              wait_s: float = 1.0, reason: str = "") -> None:  # fmt: skip
        """A process makes its Manager at `t`, waits, and trains one second later (healing takes half of it)."""
        self.replica(name, t, "made", pid, replica_id=f"{name}:{pid:08x}", ranks=1, step=0)
        self.asks(name, t, quorum_id, pid=pid, step=step, heals=heals, wait_s=wait_s, reason=reason, why="joining")

    def asks(self, name: str, t: float, quorum_id: int, *, pid: int = 1, step: int = 0, heals: bool = False,
             wait_s: float = 1.0, reason: str = "", why: str = "", failed: bool = False) -> None:  # fmt: skip
        self.replica(name, t, "asking", pid, reason=why, failed=failed, step=step)
        if reason:
            self.replica(name, t + wait_s / 4, "waiting", pid, reason=reason)
        formed = t + wait_s
        self.replica(name, formed, "entered", pid, quorum_id=quorum_id, members=[name], step=step, heals=heals)
        if heals:
            self.replica(name, formed, "heal_begun", pid, quorum_id=quorum_id, step=step, donors=["x"])
        self.replica(name, formed, "formed", pid, quorum_id=quorum_id)
        if heals:
            self.replica(name, formed + 0.5, "heal_ended", pid, ok=True, bytes=2_000_000, seconds_s=0.4, donors=["x"],
                         step=step, reason="")  # fmt: skip

    def counts(self, name: str, t: float, step: int, commits: int, *, pid: int = 1, usual_s: float = 0.1) -> None:
        self.replica(name, t, "counters", pid, step=step, commits=commits, vetoes=0, broken=0, usual_s=usual_s)

    def gap(self, name: str, t: float, cause: str, seconds_s: float, *, pid: int = 1, detail: str = "",
            usual_s: float = 0.1) -> None:  # fmt: skip
        self.replica(name, t, "gap", pid, cause=cause, detail=detail, seconds_s=seconds_s, usual_s=usual_s, step=1)

    def breaks(self, name: str, t: float, quorum_id: int, reason: str, attempt_s: float, *, moves: bool = False,
               pid: int = 1) -> None:  # fmt: skip
        self.replica(name, t, "broken", pid, quorum_id=quorum_id, reason=reason, step=1, attempt_s=attempt_s,
                     moves=moves)  # fmt: skip

    def starts(self, name: str, t: float, *, restarts: int = 0, warm: bool = False) -> None:
        self.ftrun(t, "started", group=name, pids=[1], warm=warm, restarts=restarts)

    def fails(self, name: str, t: float, *, code: int = -9, excuse: str = "", error: str = "") -> None:
        how = "was ended by SIGKILL" if code < 0 else f"exited with code {code}: {error}"
        self.ftrun(t + 0.01, "failed", group=name, rank=0, pid=1, code=code, error=error, lived_s=1.0,
                   sentence=f"rank 0 (pid 1) {how}", excuse=excuse, at_s=t)  # fmt: skip

    def leaves(self, name: str, t: float, reason: str = "finished", *, pid: int = 1, step: int = 1) -> None:
        finished = reason == "finished"
        self.replica(name, t, "left", pid, reason=reason, finished=finished, step=step)
        self.replica(name, t, "closed", pid)

    # ------------------------------------------------------------ the result

    def found(self) -> Found:
        """As the reader gives it."""
        logs = [
            Log(role, source, "host", pid, sorted(events, key=lambda one: float(one["t"])))
            for (role, source, pid), events in self.logs.items()
        ]
        return Found(sorted(logs, key=lambda log: float(log.events[0]["t"])))

    def save(self, folder: pathlib.Path, version: int = VERSION) -> None:
        """As files."""
        folder.mkdir(parents=True, exist_ok=True)
        for (role, source, pid), events in self.logs.items():
            head = event(events[0]["t"], "log", v=version, role=role, source=source, host="host", pid=pid, part=0,
                         release="0")  # fmt: skip
            lines = [head, *sorted(events, key=lambda one: float(one["t"]))]
            path = folder / f"{source}.{pid}.0.0.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def big(groups: int, seconds: float, seed: int) -> Job:
    """A job of many groups in which one of them is killed every few seconds."""
    random_, job = random.Random(seed), Job()
    names = [f"replica-{number}" for number in range(groups)]
    job.ftrun(0.0, "run_started", run_id="abc", script="train.py", groups=names, total=groups, ranks=1,
              lighthouse="x", chaos="")  # fmt: skip
    for name in names:
        job.starts(name, 0.0)
        job.joins(name, 5.0 + random_.random(), 1, wait_s=1.5)
    quorum, pids, away = 1, dict.fromkeys(names, 1), dict.fromkeys(names, 7.0)
    job.lighthouse(6.5, "quorum_formed", quorum_id=1, members=names, step=0, joined=[], without=[])
    t = 10.0
    while t < seconds - 15:
        able = [name for name in names if away[name] <= t]
        if len(able) < 2:
            t += 1.0
            continue
        victim = random_.choice(able)
        quorum, pids[victim], away[victim] = quorum + 1, pids[victim] + 1, t + 8
        members = [name for name in names if name != victim]
        job.fails(victim, t)
        job.lighthouse(t + 0.002, "member_lost", quorum_id=quorum - 1, replica_id=f"{victim}:00000000",
                       how="its supervisor reported that its process has ended")  # fmt: skip
        job.lighthouse(t + 0.05, "quorum_formed", quorum_id=quorum, members=members, step=int(t * 10), joined=[],
                       without=[victim])  # fmt: skip
        for name in members:
            if away[name] <= t:
                job.breaks(name, t + 0.003, quorum - 1, f"lost {victim}:00000000", 0.06, pid=pids[name])
                job.asks(name, t + 0.004, quorum, wait_s=0.06, why=f"lost {victim}", failed=True, pid=pids[name])
                job.gap(name, t + 0.2, "member lost", 0.2 + random_.random() / 10, pid=pids[name])
        job.starts(victim, t + 0.1, restarts=1)
        job.joins(victim, t + 4.5, quorum, pid=pids[victim], heals=True, wait_s=0.8)
        t += random_.uniform(2.0, 6.0)
    for name in names:
        job.counts(name, seconds - 1, int(seconds * 10), int(seconds * 10), pid=pids[name])
        job.leaves(name, seconds, pid=pids[name])
        job.ftrun(seconds + 0.5, "ended", group=name, how="finished")
    job.ftrun(seconds + 0.6, "run_ended", status=0, restarts=quorum - 1)
    return job
