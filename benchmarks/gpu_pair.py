"""Which devices two processes of a GPU benchmark take, and what is between them. Pure, but for `probe`.

Two GPUs: one each, over NCCL. One GPU: both on it. NCCL refuses two ranks on one device of one host, and tells hosts
apart by NCCL_HOSTID: with a different one each they connect over sockets. The kernels of both have to fit on the device
together, hence one channel. Where that does not work, gradients go over Gloo, and the table says so.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.common import BenchmarkError, Job, Options, tail
from ft_core.launch.gpus import visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_S = 90.0
"""How long two processes may take to import torch and to add up one tensor."""
ONE_GPU = {
    "NCCL_MAX_CTAS": "1", "NCCL_MAX_NCHANNELS": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """What the two processes are started with."""

    device: str
    """cpu or cuda."""
    backend: str
    """A name that FT_BACKEND takes."""
    environments: tuple[Mapping[str, str], Mapping[str, str]] = field(default_factory=lambda: ({}, {}))
    how: str = ""
    """In words, for the table."""
    one_gpu: bool = False
    """Both are on the same one."""

    def of(self, rank: int) -> dict[str, str]:
        """The environment of one of them."""
        return {"FT_BACKEND": self.backend, **self.environments[rank]}


def pairs(device: str, gpus: int, *, nccl: bool, visible: str = "") -> list[Pair]:
    """What can be tried, the best first.

    Args:
        device: cpu or cuda.
        gpus: that torch can use here.
        nccl: this torch has NCCL.
        visible: CUDA_VISIBLE_DEVICES, which may leave out GPUs that are others'; "": all are ours.
    """
    if device == "cpu":
        return [Pair("cpu", "gloo", how="two processes on the CPU, Gloo between them")]
    apart = gpus > 1
    ours = visible_gpus(visible) or ["0", "1"]
    both = ({"CUDA_VISIBLE_DEVICES": ours[0]}, {"CUDA_VISIBLE_DEVICES": ours[1 if apart else 0]})
    place = "a GPU each" if apart else "two processes on one GPU"
    found = [Pair("cuda", "gloo", both, f"{place}, Gloo between them, through host memory", one_gpu=not apart)]
    if nccl and apart:
        found.insert(0, Pair("cuda", "nccl", both, f"{place}, NCCL between them"))
    elif nccl:
        first, second = ({**both[r], **ONE_GPU, "NCCL_HOSTID": f"ft-gpu-{r}"} for r in range(2))
        found.insert(0, Pair("cuda", "nccl", (first, second), f"{place}, NCCL between them over sockets", one_gpu=True))
    return found


def choose(tried: list[tuple[Pair, str]]) -> tuple[Pair, str]:
    """The first that works, and why those before it do not.

    Args:
        tried: each with why it does not work; '': it does.

    Raises:
        BenchmarkError: none works.
    """
    failed = [f"{pair.how}: {why}" for pair, why in tried if why]
    for pair, why in tried:
        if not why:
            return pair, "; ".join(failed)
    raise BenchmarkError(f"two processes cannot reach each other: {'; '.join(failed)}")


def probe(pair: Pair, options: Options) -> str:
    """Let two processes add up a tensor. Returns why they could not; ''."""
    with Job("gpu-probe", options) as job, tempfile.TemporaryDirectory() as folder:
        both = [
            job.start(f"probe{rank}", ["benchmarks.gpu_probe", pair.device, str(rank), folder], **pair.of(rank))
            for rank in range(2)
        ]
        try:
            job.wait(lambda: all(c.process.poll() is not None for c in both), "the sum of a tensor", PROBE_S)
        except BenchmarkError as error:
            return str(error).splitlines()[0]
        bad = [child for child in both if child.process.returncode != 0]
        return tail(bad[0].log, 1) or f"ended with {bad[0].process.returncode}" if bad else ""


def find(device: str, gpus: int, options: Options, *, nccl: bool) -> tuple[Pair, str]:
    """The best pair that works here, and why a better one does not. Raises BenchmarkError."""
    tried: list[tuple[Pair, str]] = []
    for pair in pairs(device, gpus, nccl=nccl, visible=os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        tried.append((pair, probe(pair, options)))
        if not tried[-1][1]:
            break
    return choose(tried)
