"""kill -9 of one of three replicas that hold much memory: does the survivors' gap depend on how much?

    python -m benchmarks death --kills 30
    python -m benchmarks.death --kills 30 --other ../another-checkout
    python -m benchmarks.death --kills 30 --ftrun

The kernel closes the connections of a killed process after it has freed the memory, which takes the longer the more
there is. As `kill`, with 0, 2 and 4 GB resident in each replica and steps of 20 ms; of every two victims one has forked
DataLoader workers, which hold everything that it had open. The sizes take turns, and with `--other` so does the ft_core
of another checkout. `--ftrun`: the groups are ftrun's, whose keeper is the witness.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import replace

from benchmarks.common import BenchmarkError, Job, Options, Row, median, quantile, table
from benchmarks.ftrun import Launched
from benchmarks.kill import Kill, breakdown, flags_of, one

SIZES_MB = (0, 2000, 4000)
STEP_MS = 20
TURN = 6
"""Kills in one job; each replica is the victim twice."""
P50_MS, P99_MS = 8.0, 40.0
AFTER_S = 0.4
"""How long after a kill the survivors are looked at: the replacement imports torch meanwhile."""


def measure(options: Options, other: str = "") -> list[Row]:
    """`kills` of each size, in turns of a few."""
    ways = [(core, size) for size in SIZES_MB for core in ([other] if other else []) + [""]]
    found: dict[tuple[str, int], list[Kill]] = {way: [] for way in ways}
    problems = list[str]()
    while any(len(kills) < options.kills for kills in found.values()) and len(problems) < 5:
        for way in ways:
            if len(found[way]) < options.kills:
                try:
                    turn(way, replace(options, kills=min(TURN, options.kills - len(found[way]))), found[way])
                except BenchmarkError as error:
                    problems.append(f"{way[1]} MB: {str(error).splitlines()[0]}")
    rows = [row for way in ways for row in rows_of(way, found[way])]
    return [*rows, Row("death", "kills that could not be measured", str(len(problems)), "", "0", not problems,
                       "; ".join(problems))]  # fmt: skip


def turn(way: tuple[str, int], options: Options, found: list[Kill]) -> None:
    """A few kills in a job of its own."""
    core, size_mb = way
    kills = [Kill(workers=i % 2 == 1, at_once=False) for i in range(options.kills)]
    with Job("death", options) as job:
        job.trainer_flags = ("--resident-mb", str(size_mb), "--step-ms", str(STEP_MS))
        job.trainer_env = {"FT_BENCH_CORE": core} if core else {}
        job.start_lighthouse()
        for group in range(3):
            job.start_trainer(group, *flags_of(kills, group, -1))
        for number, kill in enumerate(kills):
            one(job, kills, number, settled=30)
            found.append(kill)


def under_ftrun(options: Options) -> list[Row]:
    """The same where ftrun runs the groups: the survivors' gap until the replacement can come."""
    out = []
    for size in SIZES_MB:
        gaps, quiet = list[float](), list[float]()
        script = ("benchmarks/trainer.py", "--resident-mb", str(size), "--step-ms", str(STEP_MS))
        with Launched(options, 3, script=script) as job:
            for number in range(options.kills):
                job.wait_full(30)
                group = number % 3
                others = [records[-1] for other, records in job.records.items() if other != group]
                at = time.monotonic()
                os.kill(job.pid(group), signal.SIGKILL)
                time.sleep(AFTER_S)
                job.look()
                gaps.append(max(record.beyond_normal(at, at + AFTER_S) for record in others) * 1e3)
                quiet.append(max(record.beyond_normal(at - AFTER_S, at - 0.005) for record in others) * 1e3)
            job.wait_full(30)
            job.drain()
        p50, p99 = median(gaps), quantile(gaps, 0.99)
        detail = f"p99 {p99:.0f}, max {max(gaps):.0f} ms, n={len(gaps)}; without a kill p50 {median(quiet):.1f} ms"
        met = p50 <= P50_MS and p99 <= P99_MS
        target = f"<= {P50_MS:g}, p99 <= {P99_MS:g} ms"
        what = f"gap p50, {size / 1000:g} GB resident, under ftrun"
        out.append(Row("death", what, p50, "ms", target, met, detail, tuple(gaps)))
    return out


def rows_of(way: tuple[str, int], kills: list[Kill]) -> list[Row]:
    """The table's part."""
    core, size_mb = way
    values, quiet = [k.gap * 1e3 for k in kills], [k.quiet * 1e3 for k in kills]
    what = f"{size_mb / 1000:g} GB resident" + (", other checkout" if core else "")
    p50, p99 = median(values), quantile(values, 0.99)
    met = None if core else p50 <= P50_MS and p99 <= P99_MS
    target = "" if core else f"<= {P50_MS:g}, p99 <= {P99_MS:g} ms"
    detail = f"p99 {p99:.0f}, max {max(values, default=0):.0f} ms, n={len(values)}; {breakdown(kills)}; lost at most "
    detail += f"{max((k.lost for k in kills), default=0)} attempts; without a kill p50 {median(quiet):.1f} ms"
    return [Row("death", f"gap p50, {what}", p50, "ms", target, met, detail, tuple(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--other", default="", help="a checkout of this project")
    parser.add_argument("--ftrun", action="store_true", help="the groups are ftrun's")
    args = parser.parse_args()
    options = Options(kills=args.kills)
    print(table(under_ftrun(options) if args.ftrun else measure(options, args.other)))


if __name__ == "__main__":
    main()
