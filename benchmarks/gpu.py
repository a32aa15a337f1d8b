"""Runs everything that needs a GPU: the tests marked gpu and the GPU benchmarks; writes gpu.json and docs/gpu.md.

    scripts/gpu                                    with an interpreter that has the CUDA build of torch
    python -m benchmarks.gpu --device cpu          the benchmarks over Gloo, to see whether they work; writes nothing

Ends with 0 if everything ran and kept what was promised, 1 if not, 3 if nothing ran because there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import torch

from benchmarks import gpu_kill, gpu_step
from benchmarks.common import ROOT, BenchmarkError, Options, Row, machine
from benchmarks.gpu_pair import Pair, find
from benchmarks.gpu_report import GpuReport, ReportError, counts_of, devices, into
from ft_core.doctor.facts import GpuFacts
from ft_core.doctor.host import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NOTHING_RAN = 3
JSON, PAGE = ROOT / "benchmarks/gpu.json", ROOT / "docs/gpu.md"
STATE = "benchmarks.device_state"
TESTS_S, STATE_S = 1200.0, 600.0


def missing(facts: GpuFacts) -> str:
    """Why nothing can run here; ''."""
    if facts.error:
        return f"the GPUs of this machine do not answer ({facts.error})"
    if not facts.devices:
        return "there is no NVIDIA GPU on this machine"
    if not facts.cuda:
        return f"torch {torch.__version__} of {sys.executable} is built without CUDA"
    if not facts.torch_devices:
        return (
            f"torch {torch.__version__} (CUDA {facts.cuda}) can use none of this machine's GPUs (driver {facts.driver})"
        )
    return ""


def gpu_tests() -> list[str]:
    """The files with tests marked gpu: others import what an interpreter of this machine's own may lack.

    They mark them themselves, or take all marks from tests/gpu/pair.py.
    """
    texts = {str(file): file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    return [file for file, text in texts.items() if "pytest.mark.gpu" in text or "tests.gpu.pair import" in text]


def run_tests() -> dict[str, int]:
    """All marked gpu; their output is shown. Raises BenchmarkError."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", *gpu_tests(), "-m", "gpu", "-q"]
        command.append(f"--junitxml={report}")
        # An interpreter of this machine's own may have plugins whose warnings are errors here.
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TESTS_S, check=False)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"the tests took longer than {TESTS_S:g} s") from None
        if not report.exists():
            raise BenchmarkError(f"pytest ended with {done.returncode} and wrote no report")
        try:
            return counts_of(report.read_text())
        except ReportError as error:
            raise BenchmarkError(str(error)) from None


def state(options: Options, pair: Pair) -> list[Row]:
    """Device to host and back, for state that is sent: a program of its own."""
    del options
    if pair.device == "cpu":
        raise BenchmarkError("it needs a CUDA device")
    try:
        done = subprocess.run(
            [sys.executable, "-m", STATE], cwd=ROOT, timeout=STATE_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"it took longer than {STATE_S:g} s") from None
    if done.returncode not in (0, 1):  # 1: it ran, and missed its aim
        raise BenchmarkError(f"it ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return state_rows(done.stdout)


def state_rows(printed: str) -> list[Row]:
    """The table's part, of the line that it prints last. Raises BenchmarkError."""
    try:
        found = json.loads(printed.strip().splitlines()[-1])
        return [
            Row("device_state", "state from device to host and back", found["staged_gb_per_s"], "GB/s",
                ">= 80 % of plain copies", found["met"],
                f"{found['share']:.0%} of {found['plain_gb_per_s']:.1f} GB/s; {found['megabytes']} MiB, "
                f"n={found['runs']}")
        ]  # fmt: skip
    except (IndexError, KeyError, TypeError, ValueError):
        raise BenchmarkError(f"it printed no figures: {printed.strip()[-200:]!r}") from None


BENCHMARKS: dict[str, Callable[[Options, Pair], list[Row]]] = {
    "gpu_step": gpu_step.measure, "gpu_kill": gpu_kill.measure, "device_state": state,
}  # fmt: skip


def measure(options: Options, pair: Pair) -> tuple[list[Row], dict[str, str]]:
    """All benchmarks; their rows, and why some could not be made."""
    rows: list[Row] = []
    not_run: dict[str, str] = {}
    for name, benchmark in BENCHMARKS.items():
        try:
            rows += benchmark(options, pair)
        except BenchmarkError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            not_run[name] = str(error).splitlines()[0]
    return rows, not_run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--blocks", type=int, default=12, help="of gpu_step (default %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="of gpu_kill (default %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="default with a GPU: benchmarks/gpu.json; else nowhere")
    parser.add_argument("--page", type=pathlib.Path, help="default with a GPU: docs/gpu.md; else none")
    parser.add_argument("--interpreter", default=sys.executable, help="what the report says of it")
    parser.add_argument("--keep", action="store_true", help="keep the logs and events of every process")
    args = parser.parse_args(argv)
    facts = GpuFacts() if args.device == "cpu" else gpus()
    why = "" if args.device == "cpu" else missing(facts)
    if why:
        print(f"scripts/gpu: nothing ran, because {why}.", file=sys.stderr)
        return NOTHING_RAN
    options = Options(runs=args.blocks, kills=args.kills, keep=args.keep)
    tests, not_run = dict[str, int](), dict[str, str]()
    if args.device == "cuda":
        try:
            tests = run_tests()
        except BenchmarkError as error:
            not_run["pytest -m gpu"] = str(error)
    try:
        pair, worse = find(args.device, facts.torch_devices, options, nccl=bool(facts.nccl))
        rows, failed = measure(options, pair)
        between, not_run = pair.how, {**not_run, **failed}
    except BenchmarkError as error:
        rows, between, worse = [], "nothing", str(error)
        not_run |= dict.fromkeys(BENCHMARKS, "two processes cannot reach each other")
    report = GpuReport(
        machine(), devices([gpu.name for gpu in facts.devices]) or "none", facts.driver, facts.cuda, facts.nccl,
        str(torch.__version__), args.interpreter, between, worse, tests, rows, not_run,
    )  # fmt: skip
    print(report.markdown())
    write(report, args.json or (JSON if facts.devices else None), args.page or (PAGE if facts.devices else None))
    if args.device == "cpu":
        return 1 if set(not_run) - {"device_state"} or any(row.met is False for row in rows) else 0
    return 0 if report.good else 1


def write(report: GpuReport, path: pathlib.Path | None, page: pathlib.Path | None) -> None:
    """Where it is kept."""
    if path is not None:
        path.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if page is not None:
        page.write_text(into(page.read_text(), report))


if __name__ == "__main__":
    sys.exit(main())
