"""The lighthouse with 256 and with 1,000 simulated replica groups: `lighthouse_scale.py`, each run with a fresh one."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.common import BenchmarkError, Options, Row, median, spread

ROUNDS = {256: 10, 1000: 6}
"""Of losses and joins, by the number of groups."""
LIMIT_S = 180.0


def once(groups: int, out: pathlib.Path) -> dict[str, float]:
    """One lighthouse; {what: value}."""
    script = pathlib.Path(__file__).with_name("lighthouse_scale.py")
    command = [sys.executable, str(script), "--groups", str(groups), "--rounds", str(ROUNDS[groups])]
    command += ["--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"{script.name} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return {k: v for k, v in json.loads(out.read_text()).items() if isinstance(v, float)}


def measure(options: Options) -> list[Row]:
    """Median over runs of each of its figures; targets stand in its names: "... (target 250)"."""
    return [row for groups in ROUNDS for row in _of(groups, options)]


def _of(groups: int, options: Options) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        found = [once(groups, pathlib.Path(folder) / "scale.json") for _ in range(options.runs)]
    rows = []
    for what in found[0]:
        values = [f[what] for f in found]
        name, _, rest = what.partition(" (target ")
        limit = float(rest.rstrip(")")) if rest else None
        text, unit = name.rsplit(" ", 1) if name.endswith((" s", " ms", " MB")) else (name, "")
        met = None if limit is None else median(values) <= limit
        target = f"<= {limit:g} {unit}" if limit is not None else ""
        rows.append(
            Row("scale", f"{groups} groups: {text.rstrip(',')}", median(values), unit, target, met, spread(values),
                tuple(values))
        )  # fmt: skip
    return rows
