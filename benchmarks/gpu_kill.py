"""kill -9 of one of two processes that train on a GPU: how long until the survivor commits again.

The victim is started again each time, heals from the survivor, and both train on together before the next kill. Each of
the two is killed in turn. The gap is from the kill to the survivor's next commit, alone.

    python -m benchmarks.gpu_kill --device cpu --kills 4     the same over Gloo, where there is no GPU
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from benchmarks.common import Job, Options, Row, median, quantile, spread, table
from benchmarks.gpu_pair import Pair, pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_MS = 1000.0
SETTLED = 40
"""Steps that both make together before a kill."""
JOIN_LIMIT_S = 120.0
"""A process that imports CUDA takes long."""


def measure(options: Options, pair: Pair) -> list[Row]:
    """All kills, of both processes in turn."""
    gaps: list[float] = []
    with Job("gpu-kill", options) as job:
        job.start_lighthouse()
        job.trainer_flags = ("--device", pair.device)
        for group in range(2):
            job.start_trainer(group, **pair.of(group))
        for number in range(options.kills):
            job.wait_settled(2, steps=SETTLED, limit_s=JOIN_LIMIT_S)
            victim, survivor = job.trainers[number % 2], job.trainers[1 - number % 2]
            at, _ = job.kill(victim)
            job.wait_went_on(at, participants=1, limit_s=JOIN_LIMIT_S)
            gaps.append((survivor.since(at, participants=1)[0] - at) * 1e3)
            job.start_trainer(number % 2, **pair.of(number % 2))
        job.wait_settled(2, steps=SETTLED, limit_s=JOIN_LIMIT_S)
        digests = job.finish(ahead=20)
    return rows(gaps, digests, pair)


def rows(gaps: Sequence[float], digests: set[str], pair: Pair) -> list[Row]:
    """The table's part. `gaps` in ms; `digests`: of the models at the end."""
    promised = pair.device != "cpu"

    def row(name: str, value: float) -> Row:
        return Row(
            "gpu_kill", f"survivor commits again over {pair.backend}, {name}", value, "ms",
            f"<= {LIMIT_MS:g} ms" if promised else "", value <= LIMIT_MS if promised else None,
            spread(gaps, " ms", 0), tuple(gaps),
        )  # fmt: skip

    same = len(digests) == 1
    return [
        row("p50", median(gaps)), row("p90", quantile(gaps, 0.9)),
        Row("gpu_kill", "models at the end", "equal" if same else "differ", "", "equal", same),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kills", type=int, default=10)
    args = parser.parse_args(argv)
    pair = pairs(args.device, 1, nccl=True, visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""))[0]
    print(table(measure(Options(kills=args.kills), pair)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
