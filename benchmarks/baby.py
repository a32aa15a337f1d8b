"""What a process group in a child process costs over Gloo in the process.   python benchmarks/baby.py [--rounds 30]

Two real processes on one machine; in each round every way takes its turn, in both processes at once:

- configure: a new group of the two, over a store that is connected already; the group before is ended by it;
- an allreduce of 4 MB, and of 4 KB: from the launch to the end of `wait`, the mean of a few in a row;
- for the child, the 4 MB also from a tensor in shared memory, which is not copied;
- abort: until a pending receive has failed here.

Medians over the rounds of the slower of the two processes. On a shared machine absolute times are worth little; the
ways take turns, so what else runs hits all alike.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from ft_core.process_group import ProcessGroupBabyGloo, ProcessGroupGloo, open_store, warm_store

LIMIT_S = 120.0
LARGE, SMALL = 1_000_000, 1_000
"""Elements of four bytes."""
REPEATS = 5


def replica(rank: int, rounds: int, port: Any, gate: Any, results: Any) -> None:
    """One process; rank 0 has the store."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1") if rank == 0 else None
    if store is not None:
        port.value = store.port
    gate.wait(LIMIT_S)
    address = f"127.0.0.1:{port.value}"
    warm_store(f"{address}/x", timedelta(seconds=60))
    ways = {"gloo": ProcessGroupGloo(), "child": ProcessGroupBabyGloo()}
    plain, shared = torch.ones(LARGE), torch.ones(LARGE).share_memory_()
    for number in range(rounds + 1):
        for way, group in ways.items():
            gate.wait(LIMIT_S)
            began = time.monotonic()
            group.configure(f"{address}/{way}/{number}", f"replica-{rank}", rank, 2)
            found = {"configure": time.monotonic() - began}
            tensors = {"4 MB": plain, "4 KB": plain[:SMALL]} | ({"4 MB shared": shared} if way == "child" else {})
            for what, tensor in tensors.items():
                group.allreduce([tensor]).wait()
                gate.wait(LIMIT_S)
                began = time.monotonic()
                for _ in range(REPEATS):
                    tensor.fill_(1.0)
                    group.allreduce([tensor]).wait()
                found[what] = (time.monotonic() - began) / REPEATS
            pending = group.recv([torch.zeros(1)], 1 - rank)
            gate.wait(LIMIT_S)
            began = time.monotonic()
            group.abort()
            try:
                pending.wait()
            except RuntimeError:
                found["abort"] = time.monotonic() - began
            if number:  # the first one starts the children's helper
                results.put((way, found))
            gate.wait(LIMIT_S)
    for group in ways.values():
        group.shutdown()


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """{way: {what: milliseconds}}, medians over the rounds."""
    context = multiprocessing.get_context("fork")
    port, gate, results = context.Value("i", 0), context.Barrier(2), context.Queue()
    ranks = [context.Process(target=replica, args=(rank, rounds, port, gate, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        samples: dict[str, dict[str, list[float]]] = {}
        for _ in range(rounds):
            for _ in range(2):
                pair = [results.get(timeout=LIMIT_S) for _ in range(2)]  # both processes wait for each other
                assert pair[0][0] == pair[1][0]
                of_way = samples.setdefault(pair[0][0], {})
                for what in pair[0][1]:
                    of_way.setdefault(what, []).append(1000 * max(found[what] for _, found in pair))
        for process in ranks:
            process.join(LIMIT_S)
    finally:
        for process in ranks:
            process.kill()
    return {way: {what: statistics.median(times) for what, times in found.items()} for way, found in samples.items()}


def main() -> None:
    """Print the medians, and the machine as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    found = measure(args.rounds)
    print("| what | Gloo | Gloo in a child |\n|---|---:|---:|")
    for what, milliseconds in found["child"].items():
        gloo = found["gloo"].get(what)
        print(f"| {what} | {'' if gloo is None else f'{gloo:.2f} ms'} | {milliseconds:.2f} ms |")
    print(
        json.dumps(
            {
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
                "torch": torch.__version__,
                "rounds": args.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
