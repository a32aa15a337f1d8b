"""Step time of Lightning's Trainer with strategy="fault_tolerant" over "ddp": 2 processes, nothing failing.

Three pairs of processes (`lightning_worker.py`) hold the same Trainer with the same model, an MLP the size of the
handwritten digits: `ddp`, `ddp` again (A/A), and `fault_tolerant` (two groups of one process). All stay in one `fit`;
in turn each pair trains a short block while the others wait between two batches, so what else the machine does hits
all alike. A run is one set of pairs; its figure is the median over blocks of the ratio of median step times; the table
has the median over runs. A step is everything between two batches, Trainer and data loader included.
"""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

from benchmarks.common import BenchmarkError, Child, Job, Options, Row, median, spread, tail

if TYPE_CHECKING:
    from collections.abc import Sequence

BASE, AGAIN, OURS = "ddp", "ddp again (A/A)", "fault_tolerant"
WAYS = (BASE, AGAIN, OURS)
BLOCKS, STEPS = 12, 100
LIMIT = 1.10
LIMIT_S = 120.0
LOOK_S = 0.01


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
            Row("lightning", f"Trainer, MLP 64-128-10: {way} / ddp", value, "x",
                f"<= {LIMIT:.2f}x" if promised else "", value <= LIMIT if promised else None,
                f"{median(medians[way]):.2f} over {median(medians[BASE]):.2f} ms; {spread(ratios[way], 'x', 3)}",
                tuple(ratios[way]))
        )  # fmt: skip
    return rows


def run(options: Options) -> dict[str, list[float]]:
    """Per way the median step time of each block, rank 0's."""
    with Job("lightning", options, ["--join-timeout-ms", "2000"], min_replicas=2) as job:
        job.start_lighthouse()
        pairs = {way: start(job, way) for way in WAYS}
        everybody = [child for pair in pairs.values() for child in pair]
        wait(everybody, 1)  # set up and warm
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for block in range(BLOCKS):
            for turn in range(len(WAYS)):
                pair = pairs[WAYS[(turn + block) % len(WAYS)]]
                for child in pair:
                    child.say("go")
                wait(pair, block + 2)
        for way, pair in pairs.items():
            found[way] = [json.loads(event.text) for event in pair[0].events if event.kind == "block"][1:]
        return found


def start(job: Job, way: str) -> list[Child]:
    """Two processes of `way`, with the environment of its launcher."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pair = []
    for rank in range(2):
        if way == OURS:
            env = {
                "FT_LIGHTHOUSE": job.address, "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": str(rank),
                "FT_NUM_REPLICA_GROUPS": "2", "FT_REPLICA_ID": f"pl{rank}", "FT_MIN_REPLICAS": "2",
            }  # fmt: skip
        else:
            env = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": f"bench{port}",
            }  # fmt: skip
        pair.append(job.start(f"{way.split()[0]}{port}-{rank}", ["benchmarks.lightning_worker", way.split()[0]], **env))
    return pair


def wait(children: Sequence[Child], blocks: int) -> None:
    """Until each has noted that many blocks."""
    deadline = time.monotonic() + LIMIT_S
    while any(sum(e.kind == "block" for e in child.read().events) < blocks for child in children):
        for child in children:
            if child.process.poll() is not None:
                raise BenchmarkError(f"{child.name} ended with {child.process.poll()}: {tail(child.log, 5)}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"no block within {LIMIT_S:g} s: {[tail(child.log, 1) for child in children]}")
        time.sleep(LOOK_S)
