"""Runs everything that needs a GPU: the tests marked gpu and the GPU benchmarks; writes gpu.json and docs/gpu.md.

    scripts/gpu                                    with an interpreter that has the CUDA build of torch
    python -m benchmarks.gpu --device cpu          the benchmarks over Gloo, to see whether they work; writes nothing

Ends with 0 if everything ran and kept what was promised, 1 if not, 3 if nothing ran because there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import torch

from benchmarks import gpu_kill, gpu_step
from benchmarks.common import ROOT, BenchmarkError, Options, Row, machine, tail
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


def run_tests() -> dict[str, int]:
    """All marked gpu; their output is shown. Raises BenchmarkError."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}"]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=TESTS_S, check=False)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"the tests took longer than {TESTS_S:g} s") from None
        if not report.exists():
            raise BenchmarkError(f"pytest ended with {done.returncode} and wrote no report")
        try:
            return counts_of(report.read_text())
        except ReportError as error:
            raise BenchmarkError(str(error)) from None


def state(options: Options, pair: Pair) -> list[Row]:
    """Device to host and back, for state that is sent: a program of its own, whose table is shown."""
    del options
    if importlib.util.find_spec(STATE) is None:
        raise BenchmarkError("it is not in this release")
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", STATE, "--device", pair.device]
            try:
                code = subprocess.run(
                    command, cwd=ROOT, timeout=STATE_S, stdout=out, stderr=subprocess.STDOUT, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"it took longer than {STATE_S:g} s") from None
        print(log.read_text(errors="replace"))
        if code != 0:
            raise BenchmarkError(f"it ended with {code}: {tail(log, 1)}")
        return rows_of(log.read_text(errors="replace"))


def rows_of(text: str) -> list[Row]:
    """The rows of a table that was printed, as texts: figures of a program of its own."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 6 and cells[0] not in ("figure", "---"):
            figure, what, value, target, met, detail = cells
            kept = {"ok": True, "**missed**": False}.get(met)
            found.append(Row(figure, what, value, "", target, kept, detail))
    return found


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
    return 0 if report.good or (args.device == "cpu" and not set(not_run) - {"device_state"}) else 1


def write(report: GpuReport, path: pathlib.Path | None, page: pathlib.Path | None) -> None:
    """Where it is kept."""
    if path is not None:
        path.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if page is not None:
        page.write_text(into(page.read_text(), report))


if __name__ == "__main__":
    sys.exit(main())
