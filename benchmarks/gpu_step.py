"""What vote and quorum add to a step on a GPU: a real Manager beside torch's DDP, over the same backend.

Two long-lived processes (`gpu_step_worker.py`) train the same model under torch's DDP, under it again (A/A), under it
with a host that launches the optimizer only when the device has finished backward, and under ours, in short blocks in
turn, with a barrier between. A step ends when the device has done all of it. The figure is the median over blocks of
the difference of the median step times. The third way is what any commit costs that the host decides, without a vote.
Two batch sizes: with a small one the device waits for the host, so all that Python does counts; with a large one the
host is ahead, as in training that is worth a GPU, and what counts is what the device has to wait for at the end of a
step. On one GPU both processes are clients of CUDA's Multi-Process Service, where it is there.

    python -m benchmarks.gpu_step --device cpu       the same over Gloo, where there is no GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import TYPE_CHECKING

from benchmarks.common import BenchmarkError, Job, Options, Row, spread, table, tail
from benchmarks.gpu_mps import shared_gpu
from benchmarks.gpu_pair import Pair, pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

BASE, AGAIN, OURS = "torch DDP", "torch DDP again (A/A)", "ft_core"
WAITS = "torch DDP, optimizer launched when the device has finished"
BATCHES = {"host": 64, "device": 65536}
"""By who is waited for."""
ON_CPU = ("host",)
LIMIT_S, LIMIT_US = 240.0, 100.0
Times = dict[str, dict[str, list[float]]]
"""By who is waited for, and per way: the median step time of each block, in seconds."""


def measure(options: Options, pair: Pair) -> list[Row]:
    """One pair of processes."""
    with (
        shared_gpu(wanted=pair.one_gpu) as service,
        Job("gpu-step", options, ["--join-timeout-ms", "2000"], min_replicas=2) as job,
    ):
        job.start_lighthouse()
        both = [
            job.start(
                f"step{rank}",
                ["benchmarks.gpu_step_worker", pair.device, str(rank), str(options.runs), str(job.folder)],
                FT_LIGHTHOUSE=job.address, FT_HOSTNAME="127.0.0.1", **pair.of(rank),
                **service,
            )
            for rank in range(2)
        ]  # fmt: skip

        def over() -> bool:
            codes = [child.process.poll() for child in both]
            return None not in codes or any(code not in (None, 0) for code in codes)

        job.wait(over, "the steps", LIMIT_S)
        bad = [child for child in both if child.process.poll() != 0]
        if bad:
            raise BenchmarkError(
                f"a step process failed: {tail(bad[0].log, 1)}\n" + "\n".join(tail(c.log) for c in both)
            )
        return rows(json.loads((job.folder / "times.json").read_text()), pair, service=bool(service))


def rows(times: Times, pair: Pair, *, service: bool = False) -> list[Row]:
    """The table's part. `service`: both were clients of the Multi-Process Service."""
    out = []
    for waited_for, ways in times.items():
        where = f"{pair.backend}, the {waited_for} is waited for" + (", MPS" if service else "")
        for way, to, promised in (
            (AGAIN, BASE, False), (WAITS, BASE, False), (OURS, BASE, pair.device != "cpu"), (OURS, WAITS, False)
        ):  # fmt: skip
            if not {way, to} <= ways.keys():
                continue
            added = [(a - b) * 1e6 for a, b in zip(ways[way], ways[to], strict=True)]
            value = statistics.median(added)
            out.append(
                Row("gpu_step", f"{way}: added to a step of {to} ({where})", value, "us",
                    f"<= {LIMIT_US:g} us" if promised else "", value <= LIMIT_US if promised else None,
                    f"a step of {statistics.median(ways[to]) * 1e3:.3f} ms; {spread(added, ' us', 0)}", tuple(added))
            )  # fmt: skip
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--blocks", type=int, default=12)
    args = parser.parse_args(argv)
    pair = pairs(args.device, 1, nccl=True, visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""))[0]
    print(table(measure(Options(runs=args.blocks), pair)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
