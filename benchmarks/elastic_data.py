"""The elastic loader against DataLoader + DistributedSampler; a change of membership; a hundred million indices.

One process, no faults, no training: what is measured is how fast batches come. Both loaders read the same samples in
the same batch sizes; an epoch of one and an epoch of the other take turns, and the figure is the median of the ratios.
Workers persist, and the first epoch, which starts them, does not count. Memory is taken in a process of its own.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.common import ROOT, Row, median

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.common import Options

SAMPLES, BATCH, GROUPS = 32_768, 64, 2
INDICES = 100_000_000
CHANGES = 200


class Quorum:
    """What a sampler needs of a Manager, where nothing ever fails."""

    def __init__(self) -> None:
        self.groups = GROUPS
        self.listener: Any = None

    @property
    def hooks(self) -> Any:
        return self

    def attach_data(self, listener: Any) -> None:
        self.listener = listener

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        del key, load_state_dict, state_dict

    def start_quorum(self) -> None:
        pass

    def num_participants(self) -> int:
        return self.groups

    def participating_rank(self) -> int:
        return 0

    def weigh(self, weight: int) -> None:
        del weight


class Images(Dataset[tuple[Tensor, int]]):
    """Small pictures with the usual cheap augmentation: a crop, a flip, a normalization. About 20 us each."""

    def __init__(self, count: int) -> None:
        self.pixels = torch.randint(0, 256, (count, 3, 20, 20), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pixels[index, :, index % 4 : index % 4 + 16, index % 3 : index % 3 + 16]
        if index % 2:
            picture = picture.flip(-1)
        return picture.float().div_(255).sub_(0.5), index % 10


def loaders(samples: int, workers: int) -> tuple[Callable[[], float], Callable[[], float], list[Any]]:
    """Functions that time one epoch each, of torch's loader and of ours; and what to close in the end."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    from ft_core.data import ElasticDataLoader

    dataset = Images(samples)
    sampler: Any = DistributedSampler(dataset, num_replicas=GROUPS, rank=0, shuffle=True)
    theirs: Any = DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    quorum = Quorum()
    ours = ElasticDataLoader(dataset, BATCH, manager=quorum, shuffle=True, num_workers=workers)
    epoch = 0

    def time_theirs() -> float:
        nonlocal epoch
        epoch += 1
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        count = sum(len(batch[1]) for batch in theirs)
        assert count == samples // GROUPS
        return time.perf_counter() - began

    def time_ours() -> float:
        began = time.perf_counter()
        count = 0
        for batch in ours:
            count += len(batch[1])
            quorum.listener.committed(None)
        assert count == samples // GROUPS
        return time.perf_counter() - began

    return time_theirs, time_ours, [ours]


def throughput(workers: int, runs: int, samples: int = SAMPLES) -> Row:
    """Ours over theirs, in batches per second."""
    theirs, ours, opened = loaders(samples, workers)
    theirs()
    ours()
    pairs = [(theirs(), ours()) for _ in range(3 * runs)]
    for loader in opened:
        loader.close()
    ratios = tuple(a / b for a, b in pairs)
    batches = samples // GROUPS // BATCH
    took = [median([pair[i] for pair in pairs]) / batches * 1e6 for i in (0, 1)]
    detail = f"{took[0]:.0f} and {took[1]:.0f} us a batch"
    value = median(ratios)
    what = f"throughput over DataLoader + DistributedSampler, {workers} workers"
    return Row("elastic data", what, round(value, 3), "x", ">= 0.97", value >= 0.97, detail, ratios)


def replan() -> Row:
    """What the first batch after a change of membership takes beyond an ordinary one."""
    from ft_core.data import ElasticDataLoader

    quorum = Quorum()
    loader = ElasticDataLoader(Images(SAMPLES), BATCH, manager=quorum, shuffle=True)
    ordinary: list[float] = []
    changed: list[float] = []
    while len(changed) < CHANGES:
        batches = iter(loader)
        number = 0
        while True:
            change = number % 5 == 4
            if change:
                quorum.groups = 5 - quorum.groups  # 2 and 3 in turn
            began = time.perf_counter()
            if next(batches, None) is None:
                break
            (changed if change else ordinary).append(time.perf_counter() - began)
            quorum.listener.committed(None)
            number += 1
    excess = (median(changed) - median(ordinary)) * 1e3
    worst = (sorted(changed)[int(0.99 * len(changed))] - median(ordinary)) * 1e3
    detail = f"99th percentile {worst:.2f} ms; an ordinary batch takes {median(ordinary) * 1e3:.2f} ms"
    what = "first batch after a change of membership beyond one fetch, 0 workers"
    return Row("elastic data", what, round(excess, 3), "ms", "<= 20", excess <= 20, detail, tuple(changed))


def hundred_million() -> list[Row]:
    """Memory above the dataset, and time to the first batch, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.elastic_data", "child"]
    found = json.loads(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    )
    memory, first = found["mb"], found["first_s"]
    what = f"{INDICES // 10**6} million indices: "
    return [
        Row("elastic data", what + "memory above the dataset", round(memory, 1), "MB", "<= 100", memory <= 100),
        Row("elastic data", what + "first batch", round(first, 3), "s", "<= 1", first <= 1),
    ]


class Squares:
    """A dataset of any length that takes no memory."""

    def __len__(self) -> int:
        return INDICES

    def __getitem__(self, index: int) -> int:
        return index * index


def child() -> None:
    """Read a thousand batches all over the epoch; print what that took."""
    from ft_core.data import ElasticDataLoader

    torch.set_num_threads(1)
    torch.arange(1000) * 2  # what torch loads lazily is not ours
    dataset: Any = Squares()
    before = resident_mb()
    began = time.perf_counter()
    quorum = Quorum()
    loader = ElasticDataLoader(dataset, BATCH, manager=quorum, shuffle=True)
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - began
    most = resident_mb()
    for number in range(1000):
        quorum.listener.committed(None)
        next(batches)
        if number % 20 == 0:
            most = max(most, resident_mb())
    print(json.dumps({"mb": most - before, "first_s": first_s}))


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(options: Options) -> list[Row]:
    """All rows."""
    torch.set_num_threads(1)
    rows = [throughput(workers, options.runs) for workers in (0, 2)]
    return [*rows, replan(), *hundred_million()]


if __name__ == "__main__":
    child()
