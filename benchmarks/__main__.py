"""Measure the figures: `python -m benchmarks [NAME ...]`. Prints a markdown table, writes benchmarks/results.json.

    python -m benchmarks                     everything: about 25 minutes
    python -m benchmarks step kill           some of it
    python -m benchmarks kill --kills 8      less of it

Run it on an idle machine. What is not measured keeps its rows in results.json, with the machine they were taken on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import time

from benchmarks.common import BenchmarkError, Options, Row, machine, table

FIGURES = (
    "step",
    "step_apart",
    "kill",
    "death",
    "stop",
    "lighthouse",
    "lighthouse_pair",
    "heal",
    "scale",
    "ftrun",
    "lightning",
    "lightning_kill",
    "accelerate",
    "accelerate_groups",
    "fsdp",
    "fsdp_kill",
    "elastic_data",
    "same_trajectory",
    "events",
    "dashboard",
)
RESULTS = pathlib.Path(__file__).parent / "results.json"


def save(path: pathlib.Path, name: str, found: dict[str, object]) -> None:
    """Replace one figure in the file, at once: a later one may take long, or fail."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | {name: found}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each measurement (default %(default)s)")
    parser.add_argument("--kills", type=int, default=50, help="how often `kill` kills (default %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="default %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the logs and events of every process")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(FIGURES))
    if unknown or args.runs < 1 or args.kills < 1:
        parser.error(f"unknown name {unknown[0]}" if unknown else "--runs and --kills must be at least 1")
    options, taken = Options(args.runs, args.kills, args.keep), machine()
    print(", ".join(f"{key} {value}" for key, value in taken.items()) + "\n", flush=True)
    rows: list[Row] = []
    for name in args.names or FIGURES:
        started = time.monotonic()
        try:
            found = importlib.import_module(f"benchmarks.{name}").measure(options)
        except BenchmarkError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            found = [Row(name, "could not be measured", "-", met=False, detail=str(error).splitlines()[0])]
        print(f"{name} took {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        rows += found
        save(args.json, name, {"machine": taken, "runs": args.runs, "rows": [row.as_json() for row in found]})
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
