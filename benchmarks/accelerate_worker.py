"""One of the processes behind `accelerate.py`: a training loop that does a block of steps for each line on its input.

Started by `accelerate.py`: python -m benchmarks.accelerate_worker ddp|fault_tolerant CASE
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.accelerate import CASES
from benchmarks.common import median
from ft_accelerate import FaultTolerantAccelerator


def main(way: str, name: str) -> None:
    """Train; the first block is the warm-up. After each one note the median step time and wait for the next order."""
    case = CASES[name]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_seed(0)
    accelerator = FaultTolerantAccelerator(cpu=True) if way == "fault_tolerant" else Accelerator(cpu=True)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(case.widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))
    data = TensorDataset(torch.randn(case.samples, case.widths[0]), torch.randint(0, case.widths[-1], (case.samples,)))
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, case.batch, shuffle=True)
    )
    notes = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    times: list[float] = []
    blocks, started = 0, 0.0
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            now = time.perf_counter()
            if started:
                times.append(now - started)
            started = now
            if len(times) == case.steps:
                os.write(notes, f"{time.monotonic():.6f} block {json.dumps(median(times))}\n".encode())
                times.clear()
                blocks += 1
                if blocks > case.blocks:
                    accelerator.end_training()
                    return
                sys.stdin.readline()
                started = 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
