"""Step time over plain torch DDP with every way in processes of its own: 8 layers of 2 MB, AdamW, two replicas on Gloo.

    python -m benchmarks step_apart
    python -m benchmarks.step_apart --runs 5 --other ../another-checkout

`step` holds all ways in the same two processes, which hides what depends on the process: in what state its heap is.
Here a pair of processes trains one way only, the ways take turns, and a run is one turn of all. Besides the time there
is the number of page faults per step, which does not depend on what else the machine does. `--other`: the ft_core of
another checkout takes its turn, too.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.common import BenchmarkError, Job, Options, Row, median, spread, table, tail

DDP, OURS, OTHER = "ddp", "ft_core", "other"
LIMIT, LIMIT_S = 1.05, 180.0
NAMES = {DDP: "torch DDP", OURS: "ft_core", OTHER: "ft_core of the other checkout"}


def measure(options: Options, other: str = "") -> list[Row]:
    """`runs` turns."""
    ways = [DDP, OURS, *([OTHER] if other else [])]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(options.runs):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            found[way].append(run(way, options, other if way == OTHER else ""))
    rows = []
    for way in ways:
        times, faults = ([one[key] for one in found[way]] for key in ("step_s", "faults"))
        ratios = [a / b["step_s"] for a, b in zip(times, found[DDP], strict=True)]
        if way != DDP:
            rows.append(
                Row("step_apart", f"separate processes, AdamW, 4 M parameters: {NAMES[way]} / torch DDP",
                    median(ratios), "x", f"<= {LIMIT}x", median(ratios) <= LIMIT,
                    f"{median(times) * 1e3:.1f} ms; {spread(ratios, 'x', 2)}", tuple(ratios))
            )  # fmt: skip
        rows.append(
            Row("step_apart", f"page faults per step: {NAMES[way]}", median(faults), "", "", None,
                spread(faults, "", 0), tuple(faults))
        )  # fmt: skip
    return rows


def run(way: str, options: Options, core: str) -> dict[str, float]:
    """One pair of processes."""
    with Job("step-apart", options, ["--join-timeout-ms", "2000"], min_replicas=2) as job:
        job.start_lighthouse()
        environment = {"FT_LIGHTHOUSE": job.address, "FT_HOSTNAME": "127.0.0.1", "FT_BENCH_CORE": core}
        pair = [
            job.start(f"{way}{rank}", ["benchmarks.step_apart_worker", way, str(rank), str(job.folder)], **environment)
            for rank in range(2)
        ]
        deadline = time.monotonic() + LIMIT_S
        while any(c.process.poll() is None for c in pair) and time.monotonic() < deadline:
            if any(c.process.poll() not in (None, 0) for c in pair):
                break
            time.sleep(0.2)
        if any(c.process.poll() != 0 for c in pair):
            raise BenchmarkError("a step process failed:\n" + "\n".join(tail(c.log) for c in pair))
        found: dict[str, float] = json.loads((job.folder / "times.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--other", default="", help="a checkout whose ft_core takes its turn, too")
    args = parser.parse_args()
    print(table(measure(Options(runs=args.runs), args.other)))


if __name__ == "__main__":
    main()
