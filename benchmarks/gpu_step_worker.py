"""One of the two processes behind `gpu_step.py`: trains one model under several wrappers in turn, and times every step.

Started by it: python -m benchmarks.gpu_step_worker DEVICE RANK BLOCKS FOLDER, with FT_BACKEND.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ft_core
from benchmarks.gpu_step import AGAIN, BASE, BATCHES, ON_CPU, OURS, WAITS, Times
from benchmarks.step_worker import Step, stepper
from benchmarks.trainer import build

WIDTHS = (512, 512, 512, 512, 128)
WARM_UP, STEPS = 10, 40


def model_on(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model everywhere."""
    torch.manual_seed(0)
    model = build(WIDTHS).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


class Waiting:
    """An optimizer whose host waits for the device before it launches anything."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self) -> None:
        torch.cuda.synchronize()
        self._inner.step()


def ours(device: torch.device, rank: int) -> tuple[Step, Callable[[], None]]:
    """Everything a user of ft_core runs in a step; the group is that of the device."""
    model, inner = model_on(device)
    manager = ft_core.Manager(
        min_replica_size=2, replica_id=f"step{rank}", timeout=timedelta(seconds=30),
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
    )  # fmt: skip
    wrapped = ft_core.DistributedDataParallel(manager, model)
    return stepper(wrapped, ft_core.Optimizer(manager, inner)), manager.shutdown


def main(device: torch.device, rank: int, blocks: int, folder: pathlib.Path) -> None:
    """Rank 0 writes times.json."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(os.environ["FT_BACKEND"], init_method=f"file://{folder}/store", rank=rank, world_size=2)
    beside = dist.new_group(backend="gloo")

    def timed(step: Step, batch: Tensor) -> float:
        began = time.perf_counter()
        step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    ways: dict[str, Step] = {}
    for way in (BASE, AGAIN):
        model, inner = model_on(device)
        ways[way] = stepper(nn.parallel.DistributedDataParallel(model), inner)
    if on_gpu:
        model, inner = model_on(device)
        ways[WAITS] = stepper(nn.parallel.DistributedDataParallel(model), Waiting(inner))
    ways[OURS], end = ours(device, rank)
    generator = torch.Generator().manual_seed(rank)
    found: Times = {}
    names = list(ways)
    for waited_for in BATCHES if on_gpu else ON_CPU:
        size, mine = BATCHES[waited_for], found.setdefault(waited_for, {way: [] for way in ways})
        batches = [torch.randn(size, WIDTHS[0], generator=generator).to(device) for _ in range(8)]
        for step in ways.values():
            for index in range(WARM_UP):
                timed(step, batches[index % 8])
        for block in range(blocks):
            for position in range(len(names)):
                way = names[(position + block) % len(names)]
                dist.barrier(beside)
                mine[way].append(statistics.median(timed(ways[way], batches[i % 8]) for i in range(STEPS)))
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(found))
    dist.barrier(beside)
    end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        torch.device("cuda", 0) if sys.argv[1] == "cuda" else torch.device(sys.argv[1]), int(sys.argv[2]),
        int(sys.argv[3]), pathlib.Path(sys.argv[4]),
    )  # fmt: skip
