"""Step time of a script with FaultTolerantAccelerator over the same with Accelerator and DDP: 2 processes, no failures.

Three pairs of processes (`accelerate_worker.py`) hold the same script and model, an MLP the size of the handwritten
digits, AdamW, clipping and a schedule: `ddp` (one group of two), `ddp` again (A/A), and `fault_tolerant` (two groups of
one). All stay in one training loop; in turn each pair trains a short block while the others wait between two batches,
so what else the machine does hits all alike. A run is one set of pairs; its figure is the median over blocks of the
ratio of median step times; the table has the median over runs. A step is everything between two batches, loader
included.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from benchmarks.common import Child, Job, Options, Row, median, spread
from benchmarks.lightning import wait

if TYPE_CHECKING:
    from collections.abc import Mapping

BASE, AGAIN, OURS = "ddp", "ddp again (A/A)", "fault_tolerant"
WAYS = (BASE, AGAIN, OURS)
BLOCKS, STEPS = 12, 100
LIMIT = 1.10


def measure(options: Options) -> list[Row]:
    """`runs` sets of processes."""
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    medians: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.runs):
        times = run(options)
        for way in WAYS:
            medians[way].append(median(times[way]) * 1e3)
            ratios[way].append(median([a / b for a, b in zip(times[way], times[BASE], strict=True)]))
    rows = []
    for way in (OURS, AGAIN):
        value, promised = median(ratios[way]), way == OURS
        rows.append(
            Row("accelerate", f"Accelerator, MLP 64-128-10: {way} / ddp", value, "x",
                f"<= {LIMIT:.2f}x" if promised else "", value <= LIMIT if promised else None,
                f"{median(medians[way]):.2f} over {median(medians[BASE]):.2f} ms; {spread(ratios[way], 'x', 3)}",
                tuple(ratios[way]))
        )  # fmt: skip
    return rows


def run(options: Options) -> dict[str, list[float]]:
    """Per way the median step time of each block, the first process's."""
    with Job("accelerate", options, ["--join-timeout-ms", "2000"], min_replicas=2) as job:
        job.start_lighthouse()
        pairs = {way: start(job, way) for way in WAYS}
        wait([child for pair in pairs.values() for child in pair], 1)  # set up and warm
        for block in range(BLOCKS):
            for turn in range(len(WAYS)):
                pair = pairs[WAYS[(turn + block) % len(WAYS)]]
                for child in pair:
                    child.say("go")
                wait(pair, block + 2)
        return {
            way: [json.loads(event.text) for event in pair[0].events if event.kind == "block"][1:]
            for way, pair in pairs.items()
        }


def start(job: Job, way: str) -> list[Child]:
    """Two processes of `way`, with the environment of its launcher."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pair = []
    for rank in range(2):
        env: Mapping[str, str] = {
            "FT_LIGHTHOUSE": job.address, "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": str(rank),
            "FT_NUM_REPLICA_GROUPS": "2", "FT_REPLICA_ID": f"accelerate-{rank}", "FT_MIN_REPLICAS": "2",
        } if way == OURS else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = ["benchmarks.accelerate_worker", way.split()[0]]
        pair.append(job.start(f"{way.split()[0]}{port}-{rank}", command, ACCELERATE_USE_CPU="true", **env))
    return pair
