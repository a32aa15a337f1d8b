"""SIGSTOP of one of three replicas for a while: survivors go on after the liveness timeout, it heals when it wakes.

The A/A row is the longest interval of the same survivors in a window as long, before anything was stopped.
"""

from __future__ import annotations

import os
import signal
import time

from benchmarks.common import Job, Options, Row, median, spread, started

LIVENESS_S = 1.0
FROZEN_S = 3.0


def one(job: Job, group: int) -> tuple[float, float, float]:
    """Stop and continue replica `group`: (survivors' gap, the same before, seconds until it trains again)."""
    job.wait_settled(3, steps=1500)
    victim = job.trainers.pop(group)
    at = time.monotonic()
    os.kill(victim.process.pid, signal.SIGSTOP)
    try:
        end = job.wait_went_on(at, participants=2)
        time.sleep(max(0.0, at + FROZEN_S - time.monotonic()))
    finally:
        woken, newest = time.monotonic(), max(c.read().last_step for c in job.trainers.values())
        os.kill(victim.process.pid, signal.SIGCONT)
    gap = max(c.read().beyond_normal(at, end) for c in job.trainers.values())
    quiet = max(c.beyond_normal(at - 1.0, at - 0.005) for c in job.trainers.values())
    job.trainers[group] = victim
    job.wait_went_on(woken, participants=3)
    back = min(t for t, step, n in victim.commits if t > woken and step > newest and n == 3)
    return gap, quiet, back - woken


def measure(options: Options) -> list[Row]:
    """`runs` stops, then all finish at one step."""
    flags = ("--liveness-ms", f"{LIVENESS_S * 1e3:.0f}")
    with started("stop", options, 3, lighthouse=flags, FT_LIVENESS_S=str(LIVENESS_S)) as job:
        found = [one(job, run % 3) for run in range(options.runs)]
        job.wait_settled(3)
        digests = job.finish()
    gaps, quiet, back = ([f[i] for f in found] for i in range(3))
    return [
        Row("stop", "A/A: longest step beyond normal, nothing stopped", median(quiet) * 1e3, "ms",
            samples=tuple(quiet)),
        Row("stop", "SIGSTOP: survivors' gap, liveness 1 s", median(gaps), "s", "<= 1.25 s", median(gaps) <= 1.25,
            spread(gaps, " s", 2), tuple(gaps)),
        Row("stop", "SIGCONT: trains with the others again after", median(back), "s", detail=spread(back, " s", 2),
            samples=tuple(back)),
        Row("stop", "different digests at the end", str(len(digests)), "", "1", len(digests) == 1, " ".join(digests)),
    ]  # fmt: skip
