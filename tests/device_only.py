"""`DeviceOnly`: a group that takes the memory of gradient buckets only, as NCCL takes that of a GPU only.

How it works. Where there is no GPU, what would lie in a GPU's memory is what is allocated on the model's device for
reductions: `take_over` notes the memory of every bucket. The group runs on Gloo, says that it carries no CPU memory,
and refuses, and remembers, every collective of any other tensor. `take_over` also lets it stand for Gloo wherever the
library chooses the group of the gradients.

As a script it runs the one that DEVICE_ONLY names so, and prints what was refused, and how much was carried.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this file's folder, in which `lightning` and `accelerate` are our tests

import atexit
import os
import re
import runpy
from typing import TYPE_CHECKING, Any

import torch

from ft_core import process_group
from ft_core.process_group import ProcessGroupGloo, ProcessGroupWrapper
from ft_core.reduction.flat_buckets import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Work

    from ft_core.process_group import ProcessGroup

DEVICE_MEMORY: dict[int, torch.Tensor] = {}
"""The buckets' tensors by their address; kept, so that no address is used twice."""
REFUSED: list[str] = []
"""What was refused, by all groups of this process."""
CARRIED: list[str] = []
"""Names of the collectives that were not."""


class DeviceOnly(ProcessGroupWrapper):
    """See the module's text."""

    def __init__(self, pg: ProcessGroup | None = None) -> None:
        super().__init__(ProcessGroupGloo() if pg is None else pg)

    @property
    def carries_cpu_memory(self) -> bool:
        return False

    def _launch(self, name: str, *arguments: Any) -> Work:
        for tensor in tensors_of(arguments):
            if tensor.untyped_storage().data_ptr() not in DEVICE_MEMORY:
                REFUSED.append(f"{name} of {tuple(tensor.shape)} {tensor.dtype}")
                raise RuntimeError(f"no CPU memory: {REFUSED[-1]}")
        CARRIED.append(name)
        return super()._launch(name, *arguments)


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """All in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def take_over(replace: Callable[[object, str, object], None] = setattr) -> None:
    """From here on, buckets lie in device memory, and what carries them is DeviceOnly.

    Args:
        replace: `monkeypatch.setattr`, in a test.
    """
    allocate = Bucket.__init__

    def noted(bucket: Bucket, *arguments: Any) -> None:
        allocate(bucket, *arguments)
        DEVICE_MEMORY[bucket.flat.untyped_storage().data_ptr()] = bucket.flat

    replace(Bucket, "__init__", noted)
    replace(process_group, "ProcessGroupGloo", DeviceOnly)


def report() -> None:
    """Print what became of everything."""
    print(f"device only: {len(CARRIED)} carried, {len(REFUSED)} refused: {sorted(set(REFUSED))}", flush=True)


def check(text: str, processes: int) -> None:
    """What that many of them have printed: their gradients were carried, and nothing had to be refused."""
    found = re.findall(r"device only: (\d+) carried, (\d+) refused", text)
    assert len(found) == processes, text
    assert {refused for _, refused in found} == {"0"}, text
    assert all(int(carried) > 5 for carried, _ in found), text


if __name__ == "__main__":
    atexit.register(report)
    take_over()
    sys.argv[0] = os.environ["DEVICE_ONLY"]
    runpy.run_path(sys.argv[0], run_name="__main__")
