"""The program of test_nothing_is_left_open: ftrun twice in a process of its own, where nothing else opens or closes.

Prints, as JSON, the descriptors and threads that the second run has left.
"""

from __future__ import annotations

import gc
import json
import pathlib
import sys
import threading

from tests.descriptors import descriptors
from tests.launch.job import job


def ftrun(script: pathlib.Path, *options: str) -> tuple[list[str], list[str]]:
    """Run it. Returns descriptors, as numbers and targets, and names of threads that are there afterwards."""
    with job(script, *options) as running:
        running.run()
    del running
    gc.collect()
    return list(descriptors()), [thread.name for thread in threading.enumerate()]


def main() -> None:
    script = pathlib.Path(sys.argv[1])
    first = ftrun(script)  # opens what stays open: imports, torch's own
    second = ftrun(script, "--replicas", "3")
    left = [sorted(set(after) - set(before)) for before, after in zip(first, second, strict=True)]
    print(json.dumps(left))


if __name__ == "__main__":
    main()
