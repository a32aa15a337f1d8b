"""One of the two processes behind `step_apart.py`: trains one model under one wrapper and times every step.

Started by `step_apart.py`: python -m benchmarks.step_apart_worker WAY RANK FOLDER
"""

# ruff: noqa: E402 (which ft_core is imported is the caller's choice)

from __future__ import annotations

import itertools
import json
import os
import pathlib
import resource
import sys
import time
import warnings
from datetime import timedelta

sys.path[:0] = [path for path in [os.environ.get("FT_BENCH_CORE", "")] if path]

import torch
import torch.distributed as dist
from torch import nn

import ft_core
from benchmarks.common import median

WIDTHS = (512, 1024) * 4 + (512,)
"""8 layers of 2 MB."""
WARM_UP, STEPS = 15, 40


def faults() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(way: str, rank: int, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(WIDTHS)]
    module = nn.Sequential(*layers)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    manager = None
    model: nn.Module
    if way == "ddp":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{way}", rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(module)
    else:
        manager = ft_core.Manager(
            ft_core.ProcessGroupGloo(), min_replica_size=2, replica_id=f"step{rank}", timeout=timedelta(seconds=30),
            load_state_dict=module.load_state_dict, state_dict=module.state_dict,
        )  # fmt: skip
        model, optimizer = ft_core.DistributedDataParallel(manager, module), ft_core.Optimizer(manager, optimizer)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(64, WIDTHS[0], generator=generator) for _ in range(8)]
    times, faulted = [], []
    for i in range(WARM_UP + STEPS):
        before, started = faults(), time.perf_counter()
        optimizer.zero_grad()
        model(batches[i % len(batches)]).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
        faulted.append(float(faults() - before))
    if rank == 0:
        found = {"step_s": median(times[WARM_UP:]), "faults": median(faulted[WARM_UP:])}
        (folder / "times.json").write_text(json.dumps(found))
    if manager is not None:
        manager.shutdown()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
