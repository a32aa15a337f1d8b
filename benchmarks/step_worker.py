"""One of the two processes behind `step.py`: trains one model under several wrappers in turn and times every step.

Started by `step.py`: python -m benchmarks.step_worker CASE RANK FOLDER
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it as exported
from torch.optim import SGD, Optimizer

import ft_core
from benchmarks.common import median
from benchmarks.step import AGAIN, BASE, CASES, OURS, REFERENCE, Times
from benchmarks.trainer import build

WARM_UP = 20
Step = Callable[[Tensor], None]
End = Callable[[], None]


class Steps(Protocol):
    """What a step needs of an optimizer."""

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


def stepper(model: nn.Module, optimizer: Steps) -> Step:
    """One training step; the same code for all wrappers."""

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def fresh(widths: tuple[int, ...]) -> tuple[nn.Module, Optimizer]:
    """The same model everywhere."""
    torch.manual_seed(0)
    model = build(widths)
    return model, SGD(model.parameters(), lr=1e-3)


def plain(widths: tuple[int, ...]) -> Step:
    """torch's DDP."""
    model, optimizer = fresh(widths)
    return stepper(nn.parallel.DistributedDataParallel(model), optimizer)


def ours(widths: tuple[int, ...], rank: int) -> tuple[Step, End]:
    """Everything a user of ft_core runs in a step."""
    model, optimizer = fresh(widths)
    manager = ft_core.Manager(
        ft_core.ProcessGroupGloo(), min_replica_size=2, replica_id=f"step{rank}", timeout=timedelta(seconds=30),
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
    )  # fmt: skip
    wrapped = ft_core.DistributedDataParallel(manager, model)
    return stepper(wrapped, ft_core.Optimizer(manager, optimizer)), manager.shutdown


def reference(widths: tuple[int, ...], rank: int) -> tuple[Step, End]:
    """The same with the reference implementation."""
    torchft = importlib.import_module("torchft")
    model, optimizer = fresh(widths)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)), min_replica_size=2, rank=0, world_size=1,
        replica_id=f"step{rank}", load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
    )  # fmt: skip
    wrapped = torchft.DistributedDataParallel(manager, model)

    def end() -> None:
        manager.shutdown(wait=False)
        del store_alive[:]

    store_alive = [store]
    return stepper(wrapped, torchft.Optimizer(manager, optimizer)), end


def main(key: str, rank: int, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    case, ends = CASES[key], list[End]()
    ways = {BASE: plain(case.widths), AGAIN: plain(case.widths)}
    ways[OURS], end = ours(case.widths, rank)
    ends.append(end)
    if importlib.util.find_spec("torchft"):
        ways[REFERENCE], end = reference(case.widths, rank)
        ends.append(end)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(case.batch, case.widths[0], generator=generator) for _ in range(8)]
    for step in ways.values():
        for i in range(WARM_UP):
            step(batches[i % len(batches)])
    found: Times = {way: [] for way in ways}
    names = list(ways)
    for block in range(case.blocks):
        for position in range(len(names)):
            way = names[(position + block) % len(names)]
            step, times = ways[way], list[float]()
            dist.barrier()
            for i in range(case.steps):
                started = time.perf_counter()
                step(batches[i % len(batches)])
                times.append(time.perf_counter() - started)
            found[way].append(median(times))
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(found))
    dist.barrier()
    for end in ends:
        end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
