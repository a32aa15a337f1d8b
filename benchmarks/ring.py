"""How long the process group of many replicas takes to form.   python benchmarks/ring.py [--processes 32]

Real processes, one per replica, on one machine: all configure the same Gloo group at the same moment, over the store of
the first one, several times. Per group, from the common start to the last process whose group stands:

- meeting: until a process has everybody's address, which goes through the store;
- connecting: the rest, in which Gloo opens a connection between every two of them.

And what the store has to do: how many bytes the records are that each process reads, and CPU of all processes.
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

from ft_core.process_group.gloo.group import ProcessGroupGloo
from ft_core.process_group.rendezvous import RendezvousStore
from ft_core.process_group.store_pool import open_store, warm_store

FORMS_S = 120.0


def replica(rank: int, processes: int, rounds: int, port: Any, gate: Any, results: Any) -> None:
    """One process; rank 0 has the store."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1") if rank == 0 else None
    if store is not None:
        port.value = store.port
    gate.wait(FORMS_S)
    address = f"127.0.0.1:{port.value}"
    met: list[float] = []
    exchange = RendezvousStore.set

    def timed(self: RendezvousStore, key: str, value: str | bytes) -> None:
        exchange(self, key, value)
        met.append(time.monotonic())

    RendezvousStore.set = timed  # type: ignore[method-assign]
    warm_store(f"{address}/x", timedelta(seconds=60))
    group = ProcessGroupGloo(timedelta(seconds=FORMS_S), hostname="127.0.0.1")
    for number in range(rounds):
        gate.wait(FORMS_S)
        began, used = time.monotonic(), time.process_time()
        group.configure(f"{address}/ring/{number}", f"replica-{rank}", rank, processes)
        results.put((number, began, met[-1], time.monotonic(), time.process_time() - used))
        gate.wait(FORMS_S)
    left = store.num_keys() if store is not None else 0
    if rank == 0:
        results.put((-1, left, 0.0, 0.0, 0.0))
    gate.wait(FORMS_S)
    group.shutdown()


def measure(processes: int, rounds: int) -> dict[str, float]:
    """{what: value}, medians over the rounds; the first one is not counted."""
    context = multiprocessing.get_context("fork")
    port, gate, results = context.Value("i", 0), context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=replica, args=(rank, processes, rounds + 1, port, gate, results))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    found: dict[int, list[tuple[float, ...]]] = {}
    for _ in range(processes * (rounds + 1) + 1):
        number, *values = results.get(timeout=FORMS_S)
        found.setdefault(number, []).append(tuple(values))
    for worker in workers:
        worker.join()
    met, formed, spent = [], [], []
    for number in range(1, rounds + 1):
        began = min(one[0] for one in found[number])
        met.append(1e3 * (max(one[1] for one in found[number]) - began))
        formed.append(1e3 * (max(one[2] for one in found[number]) - began))
        spent.append(1e3 * sum(one[3] for one in found[number]))
    return {
        "last process has met all, p50 ms": statistics.median(met),
        "last group stands, p50 ms": statistics.median(formed),
        "last group stands, worst ms": max(formed),
        "CPU of all processes, p50 ms": statistics.median(spent),
        "keys left in the store": found[-1][0][0],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {str(processes): measure(processes, arguments.rounds) for processes in arguments.processes}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    print(f"forming a group, {arguments.rounds} times ({machine})")
    for processes, values in rows.items():
        for name, value in values.items():
            print(f"  {processes:>4} processes: {name:<48}{value:10.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, **rows}, indent=1))


if __name__ == "__main__":
    main()
