"""For `tests/runtime/test_many_runs.py`: prepare, train, free_memory, again and again; prints what each cost."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time

import torch

from ft_accelerate import FaultTolerantAccelerator as Accelerator


def main(runs: int) -> None:
    costs: dict[str, list[float]] = {name: [] for name in ("set_up", "torn_down", "threads", "descriptors")}
    accelerator = Accelerator(cpu=True)
    gc.freeze()  # free_memory collects garbage, with and without us: not in all that was imported
    for _ in range(runs):
        start = time.perf_counter()
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        began = 0.0
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
            began = began or time.perf_counter()
        ended = time.perf_counter()
        accelerator.free_memory(model, optimizer)
        costs["set_up"].append(began - start)
        costs["torn_down"].append(time.perf_counter() - ended)
        costs["threads"].append(threading.active_count())
        costs["descriptors"].append(len(os.listdir("/proc/self/fd")))
    accelerator.end_training()
    print(json.dumps(costs))


if __name__ == "__main__":
    main(int(sys.argv[1]))
