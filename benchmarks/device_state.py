"""State from device memory through pinned buffers to device memory, against plain copies of the same bytes.

`python -m benchmarks.device_state` needs a CUDA device and prints one line of JSON: seconds and GB/s for copies of
pinned memory from and to the device (what the link can do), and for the way that a donor's and a receiver's state takes
(`ft_core.checkpointing.staging`), range by range, without a network and without checksums. All of it interleaved, the
medians of the runs. Aim: at least 0.8 of the plain copies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from ft_core.checkpointing import devices
from ft_core.checkpointing.ranges import RANGE_BYTES
from ft_core.checkpointing.staging import COPY_S, Reading, Staging
from ft_core.settings import STAGING_MB

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.device import Mark

AIM = 0.8
DEPTH = 2
"""Ranges under way at once: double-buffered."""


@dataclass(frozen=True)
class Found:
    """Medians. `share`: staged against plain, device to host and back together."""

    device: str
    megabytes: int
    runs: int
    plain_s: float
    staged_s: float
    plain_gb_per_s: float
    staged_gb_per_s: float
    share: float
    met: bool


def plain(source: torch.Tensor, target: torch.Tensor, host: torch.Tensor) -> None:
    """One copy each way, the second behind the first."""
    host.copy_(source, non_blocking=True)
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize()


def staged(source: torch.Tensor, target: torch.Tensor, staging: Staging) -> None:
    """Range by range: each is looked at only once it is in host memory, and copied on while the next one comes."""
    device = devices.device_of(source)
    assert device is not None
    staging.mark(source)
    under_way: list[tuple[int, Reading]] = []
    ends: list[Mark] = []

    def finish() -> None:
        at, reading = under_way.pop(0)
        view = torch.frombuffer(reading.view(), dtype=torch.uint8)
        ends.append(device.copy(target[at : at + view.numel()], view, None))
        reading.release(ends[-1])

    for at in range(0, source.numel(), RANGE_BYTES):
        part = source[at : at + RANGE_BYTES]
        reading = Reading(staging, None, [(0, part)], part.numel())
        if not reading.begin():
            raise RuntimeError(f"no buffer within {COPY_S:g} s")
        under_way.append((at, reading))
        if len(under_way) == DEPTH:
            finish()
    while under_way:
        finish()
    if not all(devices.wait_for(end, COPY_S) for end in ends):
        raise RuntimeError("the device did not copy")


def seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(megabytes: int = 1024, runs: int = 7) -> Found:
    """Raises RuntimeError: there is no device, or bytes came out wrong."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device here")
    nbytes = megabytes << 20
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target, host = torch.zeros_like(source), torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    staging = Staging(STAGING_MB << 20)
    plain_s, staged_s = [], []
    for run in range(runs + 1):
        ways = (seconds(lambda: plain(source, target, host)), seconds(lambda: staged(source, target, staging)))
        if not torch.equal(source, target):
            raise RuntimeError("the bytes that came out are not those that went in")
        target.zero_()
        if run:  # the first makes buffers, and warms up
            plain_s.append(ways[0])
            staged_s.append(ways[1])
    one, other = median(plain_s), median(staged_s)
    share = one / other
    rates = (2 * nbytes / one / 1e9, 2 * nbytes / other / 1e9)
    return Found(torch.cuda.get_device_name(), megabytes, runs, one, other, *rates, share, share >= AIM)


def main() -> int:
    """For scripts: 0 if the aim is met, 1 if not, 2 if there is no device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="MiB of state (default %(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="(default %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("device_state: there is no CUDA device here", file=sys.stderr)
        return 2
    found = measure(args.mb, args.runs)
    print(json.dumps(asdict(found)))
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
