"""`GpuReport`: what ran on a GPU and what came out, as benchmarks/gpu.json and as the table of docs/gpu.md. Pure.

The file has everything, the samples too; the table says device, driver, CUDA, NCCL and torch, which figures come from
NCCL and which from Gloo, and what did not run and why. Both say the same: a test renders the file and compares.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from benchmarks.common import Row, table

FROM, TO = "<!-- figures: scripts/gpu writes what is between these lines -->", "<!-- end of the figures -->"
"""Around what docs/gpu.md says of the last run."""
NOTHING = "**Nothing of this page has run on a device yet.**"
COUNTS = ("passed", "failed", "skipped")


class ReportError(ValueError):
    """A file that is none of ours; says what is wrong with it."""


@dataclass(frozen=True)
class GpuReport:
    """One run of scripts/gpu."""

    machine: Mapping[str, object]
    """Processor, commit, date and versions, as `common.machine` has them."""
    device: str
    """The GPUs by name, each kind with its number."""
    driver: str
    cuda: str
    nccl: str
    torch: str
    interpreter: str
    """Which Python, and whose: ours with the pinned torch, or one that was there."""
    between: str
    """What is between the two processes of a benchmark."""
    why_not_better: str = ""
    """Why NCCL is not, where it could be expected."""
    tests: Mapping[str, int] = field(default_factory=dict)
    """Of the tests marked gpu: how many COUNTS."""
    rows: Sequence[Row] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Benchmarks that could not be made, and why."""

    def as_json(self) -> dict[str, object]:
        """All of it."""
        return asdict(self) | {"rows": [row.as_json() for row in self.rows]}

    @staticmethod
    def from_json(found: object) -> GpuReport:
        """The other way. Raises ReportError, which names the field."""
        if not isinstance(found, dict):
            raise ReportError("gpu.json: expected an object")
        names = {one.name for one in fields(GpuReport)}
        if set(found) != names:
            raise ReportError(f"gpu.json: fields {sorted(set(found) ^ names)} are missing, or unknown")
        for name in ("device", "driver", "cuda", "nccl", "torch", "interpreter", "between", "why_not_better"):
            if not isinstance(found[name], str):
                raise ReportError(f"gpu.json: {name}={found[name]!r} is no text")
        tests = found["tests"]
        if not isinstance(tests, dict) or any(name not in COUNTS or type(n) is not int for name, n in tests.items()):
            raise ReportError(f"gpu.json: tests={tests!r}: expected whole numbers of {', '.join(COUNTS)}")
        for name in ("machine", "not_run"):
            if not isinstance(found[name], dict):
                raise ReportError(f"gpu.json: {name}={found[name]!r} is no object")
        try:
            rows = [Row(**{**row, "samples": tuple(row["samples"])}) for row in found["rows"]]
        except (TypeError, KeyError) as error:
            raise ReportError(f"gpu.json: rows: {error}") from None
        return GpuReport(**{**found, "rows": rows})

    @property
    def good(self) -> bool:
        """Everything ran, and kept what was promised."""
        failed = self.tests.get("failed", 0) or not self.tests.get("passed", 0)
        return not (failed or self.not_run or any(row.met is False for row in self.rows))

    def markdown(self) -> str:
        """What docs/gpu.md says of it."""
        tests = ", ".join(f"{self.tests.get(name, 0)} {name}" for name in COUNTS)
        lines = [
            f"Last run of `scripts/gpu`: {self.machine.get('date', '?')}, commit {self.machine.get('commit', '?')}.",
            "",
            "| | |", "|---|---|",
            f"| device | {self.device} |", f"| driver | {self.driver} |", f"| CUDA, NCCL | {self.cuda}, {self.nccl} |",
            f"| torch | {self.torch} |", f"| interpreter | {self.interpreter} |",
            f"| between the processes | {self.between} |",
        ]  # fmt: skip
        if self.why_not_better:
            lines.append(f"| why not better | {_cell(self.why_not_better)} |")
        lines.append(f"| tests marked gpu | {tests} |")
        lines += [f"| {name} did not run | {_cell(why)} |" for name, why in self.not_run.items()]
        return "\n".join([*lines, "", table(self.rows)] if self.rows else lines)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def into(document: str, report: GpuReport) -> str:
    """The page with this report in its place. Raises ReportError: it has no place for one."""
    before, start, rest = document.partition(FROM)
    _, end, after = rest.partition(TO)
    if not start or not end:
        raise ReportError(f"docs/gpu.md has no lines {FROM!r} and {TO!r}")
    return f"{before}{FROM}\n{report.markdown()}\n{TO}{after}"


def counts_of(junit: str) -> dict[str, int]:
    """How many tests passed, failed and were skipped, of pytest's --junitxml. Raises ReportError."""
    try:
        suites = list(ET.fromstring(junit).iter("testsuite"))
        totals = {name: sum(int(s.get(name, 0)) for s in suites) for name in ("tests", "failures", "errors", "skipped")}
    except (ET.ParseError, ValueError) as error:
        raise ReportError(f"pytest's report cannot be read: {error}") from None
    failed = totals["failures"] + totals["errors"]
    passed = max(0, totals["tests"] - failed - totals["skipped"])
    return {"passed": passed, "failed": failed, "skipped": totals["skipped"]}


def devices(names: Sequence[str]) -> str:
    """Such as '2 NVIDIA H100, NVIDIA A100'."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
