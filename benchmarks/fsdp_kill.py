"""kill -9 of one rank of two groups of two, whose model FSDP2 shards: the other group's gap; and the heal afterwards.

Each group is a torchrun of its own (`fsdp_kill_worker.py`); steps take PACE_S longer than they need to, as a GPU's
would. The gap is that of `kill.py`, of the group that was not hit. A heal brings a large state from the two ranks of
one group to those of the other; its figure is the bytes of one rank over the seconds that the rank says, both ranks at
the same time. One kill per process start: most of the time goes into importing torch.
"""

from __future__ import annotations

import os
import re
import signal
import time

from benchmarks.common import BenchmarkError, Child, Job, Options, Row, median, quantile, spread

PACE_S = 0.05
SETTLED = 30
"""Steps with both before a kill."""
LIMIT_S = 90.0
SMALL, LARGE = (128, 4), (880, 4)
"""Width and depth: 561 k parameters for the gap, 25 M (300 MB with AdamW's moments) for the heal."""
HEALS = 3


def start(job: Job, group: int, size: tuple[int, int], by: str = "loop") -> Child:
    """Start (or start again) a group; `by` as for `fsdp_kill_worker`."""
    child = job.start(
        f"g{group}", ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                      "benchmarks.fsdp_kill_worker", *map(str, size), str(PACE_S), by],
        FT_LIGHTHOUSE=job.address, FT_HOSTNAME="127.0.0.1", FT_REPLICA_GROUP=str(group), FT_NUM_REPLICA_GROUPS="2",
        FT_REPLICA_ID=f"g{group}",
    )  # fmt: skip
    job.trainers[group] = child
    return child


def kill_rank(job: Job, group: int) -> float:
    """kill -9 of rank 1 of a group, whose torchrun ends then; when (monotonic s)."""
    child = job.trainers.pop(group)
    pids = next(event.text.split() for event in child.events if event.kind == "pids")
    at = time.monotonic()
    os.kill(int(pids[1]), signal.SIGKILL)
    return at


def measure(options: Options) -> list[Row]:
    """`kills` kills, with each kind of loop, and HEALS heals."""
    return [*_gaps(options, "manager"), *_gaps(options, "loop"), *_heals(options)]


def _gaps(options: Options, by: str) -> list[Row]:
    gaps, quiet, lost = list[float](), list[float](), 0
    with Job(f"fsdp-kill-{by}", options) as job:
        job.start_lighthouse()
        for group in range(2):
            start(job, group, SMALL, by)
        for number in range(options.kills):
            job.wait_settled(2, steps=SETTLED, limit_s=LIMIT_S)
            at = kill_rank(job, number % 2)
            end = job.wait_went_on(at, participants=1)
            (survivor,) = job.trainers.values()
            gaps.append(survivor.beyond_normal(at, end) * 1e3)
            quiet.append(survivor.beyond_normal(at - (end - at), at - 2.5 * PACE_S) * 1e3)
            lost = max(lost, len(survivor.between(at, end, "veto")))
            start(job, number % 2, SMALL, by)
            job.wait_went_on(end, participants=2, limit_s=LIMIT_S)
    value = median(gaps)
    return [
        Row("fsdp-kill", f"FSDP2, 2 x 2, {by}, kill -9 of a rank: the other group's gap p50", value, "ms", "<= 100 ms",
            value <= 100, f"p90 {quantile(gaps, 0.9):.0f}, max {max(gaps):.0f} ms, n={len(gaps)}", tuple(gaps)),
        Row("fsdp-kill", f"A/A, {by}: p50 of the same without a kill", median(quiet), "ms", "", None,
            f"max {max(quiet):.0f} ms", tuple(quiet)),
        Row("fsdp-kill", f"{by}: attempts lost per kill, max", str(lost), "", "<= 1", lost <= 1),
    ]  # fmt: skip


def _heals(options: Options) -> list[Row]:
    rates, sizes = list[float](), list[float]()
    with Job("fsdp-heal", options) as job:
        job.start_lighthouse()
        for group in range(2):
            start(job, group, LARGE)
        for number in range(HEALS):
            job.wait_settled(2, steps=3, limit_s=LIMIT_S)
            at = kill_rank(job, number % 2)
            job.wait_went_on(at, participants=1, steps=3)
            newcomer = start(job, number % 2, LARGE)
            job.wait_went_on(time.monotonic(), participants=2, steps=2, limit_s=LIMIT_S)
            said = [re.search(r"healed to step \d+: ([\d.]+) MB in ([\d.]+) s", e.text) for e in newcomer.events]
            found = [(float(one[1]), float(one[2])) for one in said if one]
            if len(found) < 2:
                raise BenchmarkError(f"{newcomer.name}: two ranks have to heal, and {len(found)} said so")
            rates += [size / 1e3 / seconds for size, seconds in found]
            sizes += [size for size, _ in found]
    value = median(rates)
    return [
        Row("fsdp-kill", f"heal of {2 * median(sizes):.0f} MB of sharded state: per rank pair", value, "GB/s",
            ">= 1.0 GB/s", value >= 1.0, f"{spread(rates, ' GB/s', 2)}; two pairs at the same time", tuple(rates)),
    ]  # fmt: skip
