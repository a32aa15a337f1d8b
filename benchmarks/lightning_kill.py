"""kill -9 of one of three replicas of a Lightning job: the survivors' gap, and how soon the next one is back in.

Each replica is a process with a Trainer (`lightning_kill_worker.py`) whose steps take PACE_S longer than they need to,
as a GPU's would, because three processes share two cores here. The gap is that of `kill.py`. A newcomer is in step
again when it has made its first step with three participants; its set-up ended at `on_train_start`. One kill per
process start: most of the time goes into importing Lightning.
"""

from __future__ import annotations

from benchmarks.common import BenchmarkError, Child, Job, Options, Row, median, quantile, spread

KILLS_PER_RUN = 3
SETTLED = 60
"""Steps with all three before a kill."""
LIMIT_S = 60.0


def start(job: Job, group: int) -> Child:
    """Start (or start again) the replica `group`."""
    child = job.start(
        f"pl{group}", ["benchmarks.lightning_kill_worker"], FT_LIGHTHOUSE=job.address, FT_HOSTNAME="127.0.0.1",
        FT_REPLICA_GROUP=str(group), FT_NUM_REPLICA_GROUPS="3", FT_REPLICA_ID=f"pl{group}",
    )  # fmt: skip
    job.trainers[group] = child
    return child


def measure(options: Options) -> list[Row]:
    """`runs` times KILLS_PER_RUN kills."""
    gaps, quiet, batches, waits = list[float](), list[float](), list[float](), list[float]()
    lost = 0
    with Job("lightning-kill", options) as job:
        job.start_lighthouse()
        for group in range(3):
            start(job, group)
        for number in range(options.runs * KILLS_PER_RUN):
            job.wait_settled(3, steps=SETTLED, limit_s=LIMIT_S)
            at, _ = job.kill(job.trainers[number % 3])
            end = job.wait_went_on(at, participants=2)
            survivors = list(job.trainers.values())
            gaps.append(max(c.beyond_normal(at, end) for c in survivors) * 1e3)
            quiet.append(max(c.beyond_normal(at - (end - at), at - 2.5 * PACE_MS / 1e3) for c in survivors) * 1e3)
            lost = max(lost, *(len(c.between(at, end, "veto")) for c in survivors))
            newcomer = start(job, number % 3)
            job.wait_went_on(end, participants=3, limit_s=LIMIT_S)
            ready = next((e.at for e in newcomer.events if e.kind == "ready"), None)
            first = newcomer.commits[0][0]
            if ready is None:
                raise BenchmarkError(f"{newcomer.name} did not note the end of its set-up; see {newcomer.log}")
            # The step it joins in is one; those that the others made before it are what it missed.
            batches.append(sum(ready < t < first - 0.001 for t, _, n in survivors[0].commits if n == 2))
            waits.append((first - ready) * 1e3)
    value, missed = median(gaps), median(batches)
    return [
        Row("lightning-kill", "Trainer: gap p50 of the survivors", value, "ms", "<= 100 ms", value <= 100,
            f"p90 {quantile(gaps, 0.9):.0f}, max {max(gaps):.0f} ms, n={len(gaps)}", tuple(gaps)),
        Row("lightning-kill", "A/A: p50 of the same without a kill", median(quiet), "ms", "", None,
            f"max {max(quiet):.0f} ms", tuple(quiet)),
        Row("lightning-kill", "attempts lost per kill, max", str(lost), "", "<= 1", lost <= 1),
        Row("lightning-kill", "newcomer: batches of the others between its set-up and its first", missed, "", "<= 1",
            missed <= 1, f"{spread(batches)}; {median(waits):.0f} ms of {PACE_MS:g} ms steps", tuple(batches)),
    ]  # fmt: skip


PACE_MS = 20.0
"""What a training step waits, on top of its work."""
