"""Step time of a model that FSDP2 shards in two groups of two ranks, over torch's own HSDP on the same four processes.

Four processes (`fsdp_worker.py`) hold the model three times: with torch's HSDP on a 2 x 2 mesh, with ours (each group
its mesh, a Manager between them), and with torch's again (A/A). Blocks of steps take turns in the same processes, so
what else the machine does hits all alike. The figure is the median over blocks of the ratio of median step times. All
train on the same data, and have to end with the same bits. Memory: of ours, on one rank, beyond the shards themselves.
"""

from __future__ import annotations

import json
import re

from benchmarks.common import BenchmarkError, Job, Options, Row, median, spread, tail

BASE, OURS, AGAIN = "hsdp", "replicate", "hsdp again (A/A)"
CASES = (("34 k", 32, 2, 1.10), ("561 k", 128, 4, 1.10), ("4.8 M", 320, 6, 1.15))
"""Parameters, width, depth, what is promised."""
BLOCKS, STEPS, WARM = 10, 6, 2
LIMIT_S = 240.0


def measure(options: Options) -> list[Row]:
    """`runs` sets of four processes per size."""
    return [row for case in CASES for row in rows(options, *case)]


def rows(options: Options, name: str, width: int, depth: int, limit: float) -> list[Row]:
    """The figure of one size."""
    ratios: dict[str, list[float]] = {OURS: [], AGAIN: []}
    medians: dict[str, list[float]] = {BASE: [], OURS: [], AGAIN: []}
    for _ in range(options.runs):
        times = run(options, width, depth)
        for way, found in times.items():
            medians[way].append(median(found) * 1e3)
        for way, found in ratios.items():
            found.append(median([a / b for a, b in zip(times[way], times[BASE], strict=True)]))
    made = []
    for way in (OURS, AGAIN):
        value, promised = median(ratios[way]), way == OURS
        made.append(
            Row("fsdp", f"FSDP2, {name} parameters, 2 groups of 2: {way} / hsdp", value, "x",
                f"<= {limit:.2f}x" if promised else "", value <= limit if promised else None,
                f"{median(medians[way]):.2f} over {median(medians[BASE]):.2f} ms; {spread(ratios[way], 'x', 3)}",
                tuple(ratios[way]))
        )  # fmt: skip
    return made


def run(options: Options, width: int, depth: int) -> dict[str, list[float]]:
    """Per way the median step time of each block, the first process's, in seconds."""
    with Job("fsdp", options, ["--join-timeout-ms", "2000"], min_replicas=2) as job:
        job.start_lighthouse()
        child = job.start(
            "four", ["torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "benchmarks.fsdp_worker",
                     str(width), str(depth)], FT_LIGHTHOUSE=job.address, FT_HOSTNAME="127.0.0.1",
        )  # fmt: skip
        job.wait(lambda: child.process.poll() is not None, "four processes", LIMIT_S)
        text = child.log.read_text()
        times, equal = re.search(r"^TIMES (.*)$", text, re.MULTILINE), re.search(r"^EQUAL (\w+)$", text, re.MULTILINE)
        if times is None or equal is None:
            raise BenchmarkError(f"fsdp: no result\n{tail(child.log)}")
        if equal[1] != "true":
            raise BenchmarkError("fsdp: the models differ in their bits")
        found: dict[str, list[float]] = json.loads(times[1])
        return found
