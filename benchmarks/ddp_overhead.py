"""Step time of ft_core's DistributedDataParallel over torch's, on Gloo, without a Manager: what the wrapper costs.

    python benchmarks/ddp_overhead.py [--json FILE] [--reductions N] [--world-size N]

Two processes train the same model four ways, in turn, in the same run: torch's DDP, torch's DDP again (the A/A row:
noise), ours with the tail and the commit calls of a real step, and the same with `find_unused_parameters=False`. Each
way does a short block of steps, then the next one does; the figure is the median over blocks of the ratio to torch's
block beside it. A step is zero_grad, forward, loss, backward, optimizer.step.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from ft_core.ddp import DistributedDataParallel
from ft_core.device import device_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.reduction.interface import GradientReducer

MODELS: dict[str, tuple[tuple[int, ...], int, int, int]] = {
    # name: layer widths, batch size, blocks per round, steps per block
    "10 k parameters": ((64, 96, 32, 10), 32, 20, 40),
    "10 k parameters, BatchNorm": ((64, 96, 32, 10), 32, 20, 40),
    "100 layers of 32": ((32,) * 101, 32, 10, 10),
    "4 M parameters": ((1024, 1024, 1024, 1024, 1024), 64, 10, 5),
}


class Attempt:
    """A healthy quorum over one process group."""

    number = 0
    is_source = False

    leaves, rides, members, weights = False, True, 1, (1, 1)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.scale = 1.0 / group.size()
        self.is_source = group.rank() == 0

    def ready(self) -> bool:
        return True

    def launch(self, tensor: Tensor) -> Any:
        return self.group.allreduce([tensor])

    def launch_fence(self, flat: Tensor, tail: Tensor) -> Any:
        tail.zero_()
        return self.group.allreduce([flat])

    def read(self, tensor: Tensor) -> Tensor:
        return tensor

    def fence_arrived(self, tail: Tensor) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        raise SystemExit(f"a collective failed: {error}")

    report = fail


class Host:
    """Just enough of a Manager."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.attempt = Attempt(group)
        self.backend, self.through_host, self.batch_ratio, self.device_of = "gloo", True, 1.0, device_of

    @property
    def hooks(self) -> Host:
        return self

    def register_reducer(self, reducer: GradientReducer) -> None:
        pass

    unregister_reducer = register_reducer

    def current_attempt(self) -> Attempt:
        return self.attempt


def build(name: str) -> nn.Module:
    widths = MODELS[name][0]
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after)]
        layers += [nn.BatchNorm1d(after)] if "BatchNorm" in name else []
        layers += [nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stepper(model: nn.Module, inputs: Tensor, after: Callable[[], None] | None) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if after is not None:
            after()
        optimizer.step()

    return step


def vote(ours: DistributedDataParallel) -> None:
    """What should_commit asks of a reducer."""
    ours.gradient_reducer.flush()
    ours.gradient_reducer.committed()


def measure(rank: int, world_size: int, store_path: str, reductions: int, out: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size)
    rows = []
    for name, (widths, batch, blocks, steps) in MODELS.items():
        inputs = torch.randn(batch, widths[0])
        default = dist.group.WORLD
        assert default is not None
        ours = DistributedDataParallel(Host(default), build(name))
        all_used = DistributedDataParallel(Host(default), build(name), find_unused_parameters=False)
        ways = {
            "torch DDP": stepper(nn.parallel.DistributedDataParallel(build(name)), inputs, None),
            "torch DDP again (A/A)": stepper(nn.parallel.DistributedDataParallel(build(name)), inputs, None),
            "ft_core DDP": stepper(ours, inputs, functools.partial(vote, ours)),
            "ft_core DDP, all used": stepper(all_used, inputs, functools.partial(vote, all_used)),
        }
        for step in ways.values():
            for _ in range(10):
                step()
        times: dict[str, list[float]] = {way: [] for way in ways}
        names = list(ways)
        for block in range(blocks * reductions):
            for position in range(len(names)):
                way = names[(position + block) % len(names)]
                step = ways[way]
                dist.barrier()
                started = time.perf_counter()
                for _ in range(steps):
                    step()
                times[way].append((time.perf_counter() - started) / steps)
        base = times["torch DDP"]
        for way, values in times.items():
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            rows.append(
                {
                    "model": name,
                    "way": way,
                    "median_ms": statistics.median(values) * 1e3,
                    "ratio": statistics.median(ratios),
                    "ratio_of_medians": statistics.median(values) / statistics.median(base),
                }
            )
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--reductions", type=int, default=1, help="multiplies the number of blocks")
    parser.add_argument("--world-size", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = f"{directory}/rows.json"
        start: Any = spawn
        start(
            measure,
            args=(arguments.world_size, f"{directory}/store", arguments.reductions, out),
            nprocs=arguments.world_size,
        )
        rows = json.loads(Path(out).read_text())
    print(f"{'model':28} {'way':24} {'ms/step':>8} {'ratio':>7} {'of medians':>10}")
    for row in rows:
        print(
            f"{row['model']:28} {row['way']:24} {row['median_ms']:8.3f} {row['ratio']:7.3f} "
            f"{row['ratio_of_medians']:10.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
