"""kill -9 of the lighthouse, back after two seconds: training goes on, and a waiting newcomer joins soon after.

Two replicas train; a third has everything loaded and makes its Manager while there is no lighthouse. The time is from
the first accepted connection of the new lighthouse to the newcomer's first commit with three participants.
"""

from __future__ import annotations

import time

from benchmarks.common import Child, Job, Options, Row, median, spread, started

DOWN_S = 2.0
NEWCOMER = 2


def one(job: Job, lighthouse: Child) -> tuple[Child, dict[str, float]]:
    """Kill and restart the lighthouse once; the newcomer of this run is killed at the end."""
    newcomer = job.start_trainer(NEWCOMER, "--gated")
    job.wait(lambda: newcomer.read().events, "the newcomer to load")
    del job.trainers[NEWCOMER]
    job.wait_settled(2, steps=1500)
    before = {g: c.last_step for g, c in job.trainers.items()}
    down, _ = job.kill(lighthouse)
    newcomer.say("go")
    time.sleep(DOWN_S)
    asked_up = time.monotonic()
    steps = min(c.read().last_step - before[g] for g, c in job.trainers.items())
    longest = max(c.beyond_normal(down, asked_up) for c in job.trainers.values())
    quiet = max(c.beyond_normal(down - 1.0, down - 0.005) for c in job.trainers.values())
    lighthouse, up = job.start_lighthouse()
    job.trainers[NEWCOMER] = newcomer
    job.wait_went_on(up, participants=3)
    joined = newcomer.since(up, participants=3)[0]
    job.kill(newcomer)
    job.wait_went_on(joined, participants=2)
    return lighthouse, {
        "steps": steps, "longest": longest, "quiet": quiet, "ready": up - asked_up, "joined": joined - up,
    }  # fmt: skip


def measure(options: Options) -> list[Row]:
    """`runs` kills of the lighthouse in one job."""
    found: list[dict[str, float]] = []
    with started("lighthouse", options, 2) as job:
        lighthouse = next(c for c in job.children if c.name == "lighthouse")
        for _ in range(options.runs):
            lighthouse, numbers = one(job, lighthouse)
            found.append(numbers)
        digests = job.finish()
    steps, longest, quiet, ready, joined = (
        [f[key] for f in found] for key in ("steps", "longest", "quiet", "ready", "joined")
    )
    return [
        Row("lighthouse", "A/A: longest step beyond normal, lighthouse up", median(quiet) * 1e3, "ms",
            samples=tuple(quiet)),
        Row("lighthouse", "longest step beyond normal while it was down", median(longest) * 1e3, "ms",
            detail=spread([v * 1e3 for v in longest], " ms"), samples=tuple(longest)),
        Row("lighthouse", f"steps committed in the {DOWN_S:g} s it was down", median(steps), "", "> 0", min(steps) > 0,
            f"{spread(steps, digits=0)}; no replica died", tuple(steps)),
        Row("lighthouse", "up again until a newcomer trains", median(joined), "s", "<= 1 s", median(joined) <= 1.0,
            spread(joined, " s", 2), tuple(joined)),
        Row("lighthouse", "process start to listening", median(ready), "s", "<= 0.5 s", median(ready) <= 0.5,
            spread(ready, " s", 2), tuple(ready)),
        Row("lighthouse", "different digests at the end", str(len(digests)), "", "1", len(digests) == 1),
    ]  # fmt: skip
