"""Step time of a real Manager over plain torch DDP, on Gloo, two replicas, nothing failing.

Two long-lived processes (`step_worker.py`) hold the same model several times: under torch's DDP, the same again (A/A),
under ours with Manager and Optimizer, and under the reference implementation's where `torchft` can be imported. They
train it in short blocks in turn, with a barrier between, so that what else the machine does hits all alike. A run is
one pair of processes; its figure is the median over blocks of the ratio of median step times; the table has the median
over runs.
A step is zero_grad, forward, loss, backward, optimizer step: SGD, the same batches.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.common import BenchmarkError, Job, Options, Row, median, spread, tail

if TYPE_CHECKING:
    import pathlib

BASE, AGAIN, OURS, REFERENCE = "torch DDP", "torch DDP again (A/A)", "ft_core", "reference"


@dataclass(frozen=True)
class Case:
    """A model, how it is measured, and what was promised."""

    name: str
    widths: tuple[int, ...]
    batch: int
    blocks: int
    steps: int
    limit: float


CASES = {
    "10k": Case("10 k parameters", (64, 96, 32, 10), 32, blocks=12, steps=60, limit=1.25),
    "4M": Case("4 M parameters", (1024, 1024, 1024, 1024, 1024), 64, blocks=8, steps=15, limit=1.05),
}
LIMIT_S = 180.0

Times = dict[str, list[float]]
"""Per way: the median step time of each block."""


def measure(options: Options) -> list[Row]:
    """`runs` pairs of processes per model."""
    rows = []
    for key, case in CASES.items():
        ratios: dict[str, list[float]] = {}
        medians: dict[str, list[float]] = {}
        for _ in range(options.runs):
            for way, times in run(key, options).items():
                medians.setdefault(way, []).append(median(times["ours"]) * 1e3)
                ratios.setdefault(way, []).append(
                    median([a / b for a, b in zip(times["ours"], times["base"], strict=True)])
                )
        for way, values in ratios.items():
            if way != BASE:
                promised = way == OURS
                rows.append(
                    Row("step", f"{case.name}: {way} / torch DDP", median(values), "x",
                        f"<= {case.limit}x" if promised else "", median(values) <= case.limit if promised else None,
                        f"{median(medians[way]):.2f} over {median(medians[BASE]):.2f} ms; {spread(values, 'x', 3)}",
                        tuple(values))
                )  # fmt: skip
    if not any(REFERENCE in row.what for row in rows):
        rows.append(Row("step", "reference implementation", "not installed", detail="pip install torchft-nightly"))
    return rows


def run(key: str, options: Options) -> dict[str, Times]:
    """One pair of processes: for each way its block medians beside torch's."""
    with Job("step", options, ["--join-timeout-ms", "2000"], min_replicas=2) as job:
        job.start_lighthouse()
        environment = {"FT_LIGHTHOUSE": job.address, "FT_HOSTNAME": "127.0.0.1"}
        reference = Reference(job.folder) if importlib.util.find_spec("torchft") else None
        try:
            if reference:
                environment["TORCHFT_LIGHTHOUSE"] = reference.address
            pair = [
                job.start(f"step{rank}", ["benchmarks.step_worker", key, str(rank), str(job.folder)], **environment)
                for rank in range(2)
            ]
            deadline = time.monotonic() + LIMIT_S
            while any(c.process.poll() is None for c in pair) and time.monotonic() < deadline:
                if any(c.process.poll() not in (None, 0) for c in pair):
                    break
                time.sleep(0.2)
            if any(c.process.poll() != 0 for c in pair):
                raise BenchmarkError("a step process failed:\n" + "\n".join(tail(c.log) for c in pair))
        finally:
            if reference:
                reference.end()
        found: Times = json.loads((job.folder / "times.json").read_text())
    return {way: {"ours": times, "base": found[BASE]} for way, times in found.items()}


class Reference:
    """The reference implementation's own lighthouse."""

    def __init__(self, folder: pathlib.Path) -> None:
        code = (
            "import time; from torchft._torchft import LighthouseServer as L; "
            "s = L(bind='127.0.0.1:0', min_replicas=2); print(s.address(), flush=True); time.sleep(600)"
        )
        with (folder / "reference.log").open("wb") as log:
            command = [sys.executable, "-c", code]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        self.address = re.sub("//[^:]*:", "//127.0.0.1:", self._process.stdout.readline().strip())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
