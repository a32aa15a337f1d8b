"""What a fixed order of summation costs: FixedOrderDataParallel against DistributedDataParallel, on Gloo, no Manager.

Processes train one model on one elastic loader, with MICRO micro-batches each per step, in turn: with our
DistributedDataParallel under no_sync, the same again (the A/A row: noise), and with FixedOrderDataParallel. Each way
does a short block of steps, then the next one does; the figure is the median over blocks of the ratio to the first
way's block beside it. A step is all forwards and backwards of this replica's micro-batches, and optimizer.step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from benchmarks.common import Row, median

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from benchmarks.common import Options

REPLICAS = (2, 3)
MICRO = 4
"""Micro-batches per step and replica: a whole branch of the tree."""
BLOCKS, STEPS, WARM = 6, 4, 3
MODELS: dict[str, tuple[tuple[int, ...], int]] = {
    # name: layer widths, samples per micro-batch
    "10 k parameters": ((64, 96, 32, 10), 32),
    "4 M parameters": ((1024, 1024, 1024, 1024, 1024), 64),
}


class Attempt:
    """A healthy quorum over one process group."""

    number, rides = 0, True

    def __init__(self, group: Any) -> None:
        self.group = group
        self.scale = 1.0 / group.size()
        self.is_source = group.rank() == 0

    def ready(self) -> bool:
        return True

    def launch(self, tensor: Any) -> Any:
        return self.group.allreduce([tensor])

    def launch_fence(self, flat: Any, tail: Any) -> Any:
        tail.zero_()
        return self.group.allreduce([flat])

    def read(self, tensor: Any) -> Any:
        return tensor

    def fence_arrived(self, tail: Any) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        raise SystemExit(f"a collective failed: {error}")

    report = fail


class Host:
    """What a wrapper and a sampler need of a Manager, where nothing ever fails."""

    backend, through_host, batch_ratio = "gloo", True, 1.0

    def device_of(self, device: Any) -> Any:
        from ft_core.device import device_of

        return device_of(device)

    def __init__(self, group: Any) -> None:
        self.group = group
        self.attempt = Attempt(group)
        self.gradient_reducer: Any = None
        self.listener: Any = None
        self._config = SimpleNamespace(world_size=1)

    @property
    def hooks(self) -> Any:
        return self

    def register_reducer(self, reducer: Any) -> None:
        self.gradient_reducer = reducer

    def attach_data(self, listener: Any) -> None:
        self.listener = listener

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        pass

    def require_all_contributions(self) -> None:
        pass

    def start_quorum(self) -> None:
        self.attempt = Attempt(self.group)

    def current_attempt(self) -> Attempt:
        return self.attempt

    def num_participants(self) -> int:
        return int(self.group.size())

    def participating_rank(self) -> int:
        return int(self.group.rank())

    def weigh(self, weight: int) -> None:
        pass

    def commit(self) -> None:
        self.gradient_reducer.flush()
        self.gradient_reducer.committed()
        self.listener.committed(None)


def build(widths: tuple[int, ...]) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stepper(way: str, widths: tuple[int, ...], samples: int, group: Any) -> Callable[[], None]:
    """A function that trains for one step."""
    import torch
    from torch.utils.data import TensorDataset

    from ft_core.data import ElasticDataLoader
    from ft_core.ddp import DistributedDataParallel
    from ft_core.fixed_order import FixedOrderDataParallel

    host = Host(group)
    data = TensorDataset(torch.randn(samples * MICRO * group.size() * 8, widths[0]))
    loader = ElasticDataLoader(
        data,
        samples,
        manager=cast("Any", host),
        global_batch_size=samples * MICRO * group.size(),
        fixed_micro_batches=True,
    )
    module = build(widths)
    fixed = way == "fixed order"
    model: Any = (FixedOrderDataParallel if fixed else DistributedDataParallel)(
        cast("Any", host), module, *([loader] if fixed else [])
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, foreach=True)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    endless = batches()

    def step() -> None:
        optimizer.zero_grad()
        while True:
            (x,) = next(endless)
            with contextlib.nullcontext() if fixed or loader.last_micro_batch else model.no_sync():
                model(x).square().mean().backward()
            if loader.last_micro_batch:
                break
        host.commit()
        optimizer.step()

    return step


def run(rank: int, world_size: int, store_path: str, runs: int, out: str) -> None:
    """One replica."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size)
    found: dict[str, dict[str, list[float]]] = {}
    for name, (widths, samples) in MODELS.items():
        steppers = {
            way: stepper(way, widths, samples, dist.group.WORLD) for way in ("DDP", "DDP again (A/A)", "fixed order")
        }
        for step in steppers.values():
            for _ in range(WARM):
                step()
        times: dict[str, list[float]] = {way: [] for way in steppers}
        ways = list(steppers)
        for block in range(BLOCKS * runs):
            for position in range(len(ways)):
                way = ways[(position + block) % len(ways)]
                dist.barrier()
                started = time.perf_counter()
                for _ in range(STEPS):
                    steppers[way]()
                times[way].append((time.perf_counter() - started) / STEPS)
        found[name] = times
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: Options) -> list[Row]:
    """All rows of this figure."""
    from torch.multiprocessing.spawn import spawn

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[Row] = []
    for replicas in REPLICAS:
        with tempfile.TemporaryDirectory() as directory:
            out = f"{directory}/times.json"
            start: Any = spawn
            start(run, args=(replicas, f"{directory}/store", options.runs, out), nprocs=replicas)
            found = json.loads(Path(out).read_text())
        for name, times in found.items():
            base = times["DDP"]
            for way, values in times.items():
                ratios = [value / other for value, other in zip(values, base, strict=True)]
                what = f"{name}, {replicas} replicas, {way}: step time over DDP's"
                detail = f"{median(values) * 1e3:.1f} ms per step of {MICRO} micro-batches each"
                rows.append(Row("same_trajectory", what, median(ratios), "x", detail=detail, samples=tuple(ratios)))
    return rows
