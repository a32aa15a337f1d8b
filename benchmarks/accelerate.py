"""Step time of a script with FaultTolerantAccelerator over the same with Accelerator and DDP: no failures.

Two figures: `accelerate` has two groups of one process, `accelerate_groups` two groups of two, with a larger model.
Three sets of processes (`accelerate_worker.py`) hold the same script and model, an MLP, AdamW, clipping and a schedule:
`ddp`, `ddp` again (A/A), and `fault_tolerant`. All stay in one training loop; in turn each set trains a short block
while the others wait between two batches, so what else the machine does hits all alike. A run is three such sets; its
figure is the median over blocks of the ratio of median step times; the table has the median over runs. A step is
everything between two batches, loader included.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

from benchmarks.common import Child, Job, Options, Row, median, spread
from benchmarks.lightning import wait

BASE, AGAIN, OURS = "ddp", "ddp again (A/A)", "fault_tolerant"
WAYS = (BASE, AGAIN, OURS)


@dataclass(frozen=True)
class Case:
    """What is trained by how many. `limit`: what is promised."""

    figure: str
    title: str
    widths: tuple[int, ...]
    samples: int
    batch: int
    ranks: int
    """Processes of each of the two groups."""
    blocks: int
    steps: int
    """In a block."""
    limit: float


CASES = {
    "digits": Case("accelerate", "MLP 64-128-10", (64, 128, 10), 20_000, 32, 1, blocks=12, steps=100, limit=1.10),
    "4M": Case(
        "accelerate_groups", "4 M parameters, 2 groups of 2", (1024,) * 5, 4_000, 8, 2, blocks=8, steps=15, limit=1.15
    ),
}


def measure(options: Options) -> list[Row]:
    """`runs` sets of processes."""
    return rows(options, "digits")


def rows(options: Options, name: str) -> list[Row]:
    """The figure of a case."""
    case = CASES[name]
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    medians: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.runs):
        times = run(options, name)
        for way in WAYS:
            medians[way].append(median(times[way]) * 1e3)
            ratios[way].append(median([a / b for a, b in zip(times[way], times[BASE], strict=True)]))
    found = []
    for way in (OURS, AGAIN):
        value, promised = median(ratios[way]), way == OURS
        found.append(
            Row(case.figure, f"Accelerator, {case.title}: {way} / ddp", value, "x",
                f"<= {case.limit:.2f}x" if promised else "", value <= case.limit if promised else None,
                f"{median(medians[way]):.2f} over {median(medians[BASE]):.2f} ms; {spread(ratios[way], 'x', 3)}",
                tuple(ratios[way]))
        )  # fmt: skip
    return found


def run(options: Options, name: str) -> dict[str, list[float]]:
    """Per way the median step time of each block, the first process's."""
    with Job("accelerate", options, ["--join-timeout-ms", "2000"], min_replicas=2) as job:
        job.start_lighthouse()
        sets = {way: start(job, way, name) for way in WAYS}
        wait([child for children in sets.values() for child in children], 1)  # set up and warm
        for block in range(CASES[name].blocks):
            for turn in range(len(WAYS)):
                children = sets[WAYS[(turn + block) % len(WAYS)]]
                for child in children:
                    child.say("go")
                wait(children, block + 2)
        return {
            way: [json.loads(event.text) for event in children[0].events if event.kind == "block"][1:]
            for way, children in sets.items()
        }


def start(job: Job, way: str, name: str) -> list[Child]:
    """The processes of `way`, with the environment of its launcher."""
    ranks, children, ports = CASES[name].ranks, [], [free_port() for _ in range(2)]
    for number in range(2 * ranks):
        group, rank, size = (*divmod(number, ranks), ranks) if way == OURS else (0, number, 2 * ranks)
        env: dict[str, str] = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[group]),
        } if size > 1 else {}  # fmt: skip
        if way == OURS:
            env |= {
                "FT_LIGHTHOUSE": job.address, "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": str(group),
                "FT_NUM_REPLICA_GROUPS": "2", "FT_REPLICA_ID": f"accelerate-{group}", "FT_MIN_REPLICAS": "2",
            }  # fmt: skip
        command = ["benchmarks.accelerate_worker", way.split()[0], name]
        children.append(job.start(f"{way.split()[0]}{ports[0]}-{number}", command, ACCELERATE_USE_CPU="true", **env))
    return children


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
