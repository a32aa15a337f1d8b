"""A newcomer receives 300 MB from two survivors that go on training: throughput, and what it costs them.

The state is one inert tensor beside the model of 10 k parameters. The newcomer has loaded everything before the clock
starts. The survivors' longest step is looked for from its start until their 20th commit with it.
"""

from __future__ import annotations

import re

from benchmarks.common import Child, Job, Options, Row, median, spread, started

MEGABYTES = 300
NEWCOMER = 2
RECEIVED = re.compile(r"healed to step \d+: (\S+) MB in (\S+) s from (\d+) donors")
PREFETCHED = re.compile(r"prefetched (\S+) MB of live state from (\d+) donors in (\S+) s")


def transfers(newcomer: Child) -> list[tuple[float, float, int]]:
    """(MB, seconds, donors) of everything the newcomer copied."""
    out = []
    for event in newcomer.events:
        if found := RECEIVED.search(event.text):
            out.append((float(found[1]), float(found[2]), int(found[3])))
        elif found := PREFETCHED.search(event.text):
            out.append((float(found[1]), float(found[3]), int(found[2])))
    return out


def one(job: Job) -> dict[str, float]:
    """One newcomer."""
    newcomer = job.start_trainer(NEWCOMER, "--gated", "--inert-mb", str(MEGABYTES))
    job.wait(lambda: newcomer.read().events, "the newcomer to load")
    del job.trainers[NEWCOMER]
    job.wait_settled(2)
    survivors = list(job.trainers.values())
    go = max(c.commits[-1][0] for c in survivors)
    newcomer.say("go")
    job.trainers[NEWCOMER] = newcomer
    end = job.wait_went_on(go, participants=3)
    moved = transfers(newcomer)
    if not moved:
        raise RuntimeError(f"the newcomer logged no transfer; see {newcomer.log}")
    normal = median([i for c in survivors for i in c.intervals(go - 1.0, go)])
    big = max(moved)
    numbers = {
        "normal": normal,
        "longest": max(i for c in survivors for i in c.intervals(go, end)),
        "quiet": max(i for c in survivors for i in c.intervals(go - (end - go), go - 0.005)),
        "transfer": sum(seconds for _, seconds, _ in moved),
        "speed": big[0] / big[1] / 1e3,
        "donors": float(big[2]),
        "joined": newcomer.since(go, participants=3)[0] - go,
    }
    job.kill(newcomer)
    job.wait_went_on(end, participants=2)
    return numbers


def measure(options: Options) -> list[Row]:
    """`runs` newcomers, one after the other."""
    with started("heal", options, 2, "--inert-mb", str(MEGABYTES)) as job:
        found = [one(job) for _ in range(options.runs)]
        digests = job.finish()
    keys = ("normal", "longest", "quiet", "transfer", "speed", "donors", "joined")
    normal, longest, quiet, transfer, speed, donors, joined = ([f[key] for f in found] for key in keys)
    limits = [2 * n + t / 4 for n, t in zip(normal, transfer, strict=True)]
    shares = [value / limit for value, limit in zip(longest, limits, strict=True)]
    return [
        Row("heal", f"transfer of {MEGABYTES} MB", median(speed), "GB/s", ">= 1.5 GB/s", median(speed) >= 1.5,
            spread(speed, " GB/s", 2), tuple(speed)),
        Row("heal", "donors used", str(int(min(donors))), "", "2", min(donors) == 2),
        Row("heal", "A/A: survivors' longest step, nobody joining", median(quiet) * 1e3, "ms",
            detail=f"median step {median(normal) * 1e3:.1f} ms", samples=tuple(quiet)),
        Row("heal", "survivors' longest step around the join", median(longest) * 1e3, "ms",
            f"<= {median(limits) * 1e3:.0f} ms (2 x median + transfer / 4)", median(shares) <= 1.0,
            spread([v * 1e3 for v in longest], " ms", 0), tuple(longest)),
        Row("heal", "newcomer: Manager made until it trains", median(joined), "s", detail=spread(joined, " s", 2),
            samples=tuple(joined)),
        Row("heal", "different digests at the end", str(len(digests)), "", "1", len(digests) == 1),
    ]  # fmt: skip
