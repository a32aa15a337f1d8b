"""Run seeds: `python -m tests.simulation --seed N --trace`, or `--seeds 2000 [--start N]`; `--ranks 2` for all.

`--pair` draws runs under two lighthouses.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

from tests.simulation.config import PAIR_FAULTS, Config
from tests.simulation.world import simulate


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--ranks", type=int, help="ranks of each group; default: drawn")
    parser.add_argument("--pair", action="store_true", help="two lighthouses, and what befalls them, beside the rest")
    parser.add_argument("--trace", action="store_true", help="print the whole transcript, not its last 60 lines")
    parser.add_argument("--keep-going", action="store_true")
    args = parser.parse_args()
    fixed: dict[str, Any] = {} if args.ranks is None else {"ranks": args.ranks}
    if args.pair:
        fixed |= {"pair": True, "faults": (*PAIR_FAULTS, "kill", "freeze", "cut_all", "blip")}
    if args.seed is not None:
        config = Config.draw(args.seed, **fixed)
        result = simulate(args.seed, config)
        print(config)
        print(result.world.transcript(0 if args.trace else 60))
        print(result.violation or "every invariant held", dict(result.world.history.remainder))
        return result.violation is not None
    began, found, remainder = time.perf_counter(), Counter[str](), Counter[str]()
    events = commits = heals = 0
    for seed in range(args.start, args.start + args.seeds):
        world = (result := simulate(seed, Config.draw(seed, **fixed))).world
        events, commits = events + world.events, commits + world.history.commits
        heals += world.history.heals
        remainder.update(world.history.remainder)
        if result.violation:
            found[result.violation.rule] += 1
            print(f"seed {seed}: {result.violation}")
            if not args.keep_going:
                print(world.transcript(60))
                break
    took = time.perf_counter() - began
    print(f"{args.seeds} seeds in {took:.1f} s ({args.seeds / took:.0f}/s), {events} events, {commits} commits, "
          f"{heals} heals; violations {dict(found)}; remainder {dict(remainder)}")  # fmt: skip
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
