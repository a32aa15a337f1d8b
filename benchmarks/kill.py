"""kill -9 of one of three replicas: how long the survivors stand still, and where that time goes.

Each kill is one of four kinds in turn: the victim has forked DataLoader workers or not, and is started again at once or
only after the survivors were seen to go on. The gap is the longest interval between two commits of a survivor that
touches the time from the kill to its 20th commit with two participants, less its median step before. The A/A row is the
same figure for windows as long, just before each kill.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.common import BenchmarkError, Child, Job, Options, Row, median, quantile, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

STAGES = ("kill", "gone", "noticed", "asked", "answered", "configuring", "configured", "committed")
WORKERS = 2
JOIN_LIMIT_S = 30.0


@dataclass
class Kill:
    """What one kill did to the survivors. Seconds."""

    workers: bool
    at_once: bool
    gap: float = 0.0
    quiet: float = 0.0
    """The same figure just before."""
    rejoin: float = 0.0
    """Longest interval beyond normal while the victim came back."""
    lost: int = 0
    """Attempts of a survivor that were not committed."""
    stages: list[dict[str, float]] = field(default_factory=list)
    """Per survivor: seconds after the kill at which it reached each stage."""
    first_word: list[str] = field(default_factory=list)
    """Per survivor: what told it first, a push from the lighthouse or its own failed (broken) collective."""


def schedule(kills: int) -> list[Kill]:
    """All four kinds, and each with each of the three victims."""
    return [Kill(workers=i % 2 == 1, at_once=i % 4 >= 2) for i in range(kills)]


def flags_of(kills: Sequence[Kill], group: int, after: int) -> list[str]:
    """What the process of `group` must be started with, for the next time it is the victim after kill `after`."""
    coming = [k for i, k in enumerate(kills) if i > after and i % 3 == group]
    return ["--workers", str(WORKERS)] if coming and coming[0].workers else []


def stages_of(survivor: Child, at: float, gone: float, end: float) -> dict[str, float]:
    """When (seconds after the kill) this survivor first reached each stage of the last round before `end`."""
    out = {"kill": 0.0, "gone": gone - at}
    noticed = survivor.between(at, end, "broken", "pushed", "aborted")
    if noticed:
        out["noticed"] = noticed[0].at - at
    for kind in ("asked", "answered", "configuring", "configured"):
        found = survivor.between(at, end, kind)
        if found:
            out[kind] = found[-1].at - at  # a round may be repeated: the last one counts
    committed = survivor.since(at, participants=2)
    if committed:
        out["committed"] = committed[0] - at
    return out


def one(job: Job, kills: Sequence[Kill], number: int, settled: int = 300) -> None:
    """Kill replica number % 3 after `settled` steps, wait until the survivors go on, and until it is back."""
    kill, group = kills[number], number % 3
    job.wait_settled(3, steps=settled, limit_s=JOIN_LIMIT_S)
    victim, next_flags = job.trainers[group], flags_of(kills, group, number)
    at, gone = job.kill(victim)
    survivors = list(job.trainers.values())
    if kill.at_once:
        job.start_trainer(group, *next_flags)
        time.sleep(0.5)  # it imports; nothing of ours may compete with the survivors as well
        job.trainers.pop(group)
    end = job.wait_went_on(at, participants=2)
    kill.gap = max(c.beyond_normal(at, end) for c in survivors)
    kill.quiet = max(c.beyond_normal(at - (end - at), at - 0.005) for c in survivors)
    kill.lost = max(len(c.between(at, end, "veto")) for c in survivors)
    kill.stages = [stages_of(c, at, gone, end) for c in survivors]
    kill.first_word = [e[0].kind for c in survivors if (e := c.between(at, end, "pushed", "broken"))]
    if kill.at_once:
        job.trainers[group] = job.children[-1]
    else:
        job.start_trainer(group, *next_flags)
    back = job.wait_went_on(end, participants=3, limit_s=JOIN_LIMIT_S)
    kill.rejoin = max(c.beyond_normal(end, back) for c in survivors)


def breakdown(kills: Sequence[Kill]) -> str:
    """Median time from each stage to the next, in ms."""
    parts = []
    for before, after in itertools.pairwise(STAGES):
        steps = [s[after] - s[before] for k in kills for s in k.stages if before in s and after in s]
        parts.append(f"{after} +{median(steps) * 1e3:.1f}")
    told = Counter(word for k in kills for word in k.first_word)
    return f"kill, {', '.join(parts)}; first told by {dict(told)}"


def rows(kills: Sequence[Kill], problems: Sequence[str]) -> list[Row]:
    """The table's part."""

    def gaps(name: str, chosen: Sequence[Kill], target: str = "", limit_ms: float | None = None) -> Row:
        values = [k.gap * 1e3 for k in chosen]
        high = f"p90 {quantile(values, 0.9):.0f}, max {max(values, default=0):.0f} ms, n={len(values)}"
        met = None if limit_ms is None else median(values) <= limit_ms
        return Row(
            "kill", f"gap p50, {name}", median(values), "ms", target, met, f"{high}; {breakdown(chosen)}", tuple(values)
        )

    without, with_ = [k for k in kills if not k.workers], [k for k in kills if k.workers]
    slow, quiet = [k for k in kills if k.gap > 0.150], [k.quiet * 1e3 for k in kills]
    rejoin, lost = [k.rejoin * 1e3 for k in kills], max((k.lost for k in kills), default=0)
    allowed = max(2, round(0.04 * len(kills))) if len(kills) >= 50 else 2
    return [
        Row("kill", "A/A: p50 of the same without a kill", median(quiet), "ms", "", None,
            f"p90 {quantile(quiet, 0.9):.1f}, max {max(quiet, default=0):.1f} ms", tuple(quiet)),
        gaps("all", kills, "<= 50 ms", 50.0),
        gaps("no workers", without),
        gaps("with DataLoader workers in it", with_, "<= 150 ms", 150.0),
        gaps("restarted at once", [k for k in kills if k.at_once]),
        gaps("restarted later", [k for k in kills if not k.at_once]),
        Row("kill", f"gaps above 150 ms, of {len(kills)}", str(len(slow)), "", f"<= {allowed}", len(slow) <= allowed),
        Row("kill", "attempts lost per kill, max", str(lost), "", "<= 1", lost <= 1),
        Row("kill", "gap p50 when the victim comes back", median(rejoin), "ms", "", None,
            f"p90 {quantile(rejoin, 0.9):.0f} ms, {spread(rejoin, ' ms', 0)}", tuple(rejoin)),
        Row("kill", "kills that could not be measured", str(len(problems)), "", "0", not problems, "; ".join(problems)),
    ]  # fmt: skip


def measure(options: Options) -> list[Row]:
    """All kills. A job that breaks is replaced, and counted."""
    kills, done, problems = schedule(options.kills), 0, list[str]()
    while done < len(kills) and len(problems) < 5:
        try:
            with Job("kill", options) as job:
                job.start_lighthouse()
                for group in range(3):
                    job.start_trainer(group, *flags_of(kills, group, done - 1))
                while done < len(kills):
                    one(job, kills, done)
                    done += 1
        except BenchmarkError as error:
            problems.append(f"kill {done}: {str(error).splitlines()[0]}")
            del kills[done]
    return rows(kills[:done], problems)
