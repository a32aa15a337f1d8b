"""The lighthouse with 256 simulated replica groups: `lighthouse_scale.py`, run `runs` times, each with a fresh one."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.common import BenchmarkError, Options, Row, median, spread

GROUPS = 256
ROUNDS = 10
LIMIT_S = 120.0


def once(out: pathlib.Path) -> dict[str, float]:
    """One lighthouse; {what: value}."""
    script = pathlib.Path(__file__).with_name("lighthouse_scale.py")
    command = [sys.executable, str(script), "--groups", str(GROUPS), "--rounds", str(ROUNDS), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"{script.name} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return {k: v for k, v in json.loads(out.read_text()).items() if isinstance(v, float)}


def measure(options: Options) -> list[Row]:
    """Median over runs of each of its figures; targets stand in its names: "... (target 250)"."""
    with tempfile.TemporaryDirectory() as folder:
        found = [once(pathlib.Path(folder) / "scale.json") for _ in range(options.runs)]
    rows = []
    for what in found[0]:
        values = [f[what] for f in found]
        name, _, rest = what.partition(" (target ")
        limit = float(rest.rstrip(")")) if rest else None
        text, unit = name.rsplit(" ", 1) if name.endswith((" s", " ms", " MB")) else (name, "")
        met = None if limit is None else median(values) <= limit
        target = f"<= {limit:g} {unit}" if limit is not None else ""
        rows.append(
            Row("scale", f"{GROUPS} groups: {text.rstrip(',')}", median(values), unit, target, met, spread(values),
                tuple(values))
        )  # fmt: skip
    return rows
