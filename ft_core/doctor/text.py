"""Findings as text for a terminal: one table, the worst first. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.doctor.findings import Level, by_level
from ft_core.report.text import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ft_core.doctor.findings import Finding

WIDTH, WIDTH_MIN, TEXT_MIN = 120, 60, 30
"""Columns of the table, how few a terminal may have, and how few its last column has."""
WHERE_MAX = 24


def render(findings: Iterable[Finding], width: int = WIDTH) -> str:
    """The table, and a line that sums it up."""
    ordered = [_plain(finding) for finding in by_level(findings)]
    if not ordered:
        return "nothing was looked at\n"
    level = max(len(finding.level.value) for finding in ordered)
    check = max(len(finding.check) for finding in ordered)
    where = min(WHERE_MAX, max(len(finding.where) for finding in ordered))
    room = max(TEXT_MIN, max(width, WIDTH_MIN) - level - check - where - 6)
    lines: list[str] = []
    for finding in ordered:
        cells = textwrap.wrap(finding.text, room) or [""]
        cells += textwrap.wrap(f"-> {finding.todo}", room, subsequent_indent="   ") if finding.todo else []
        places = textwrap.wrap(finding.where, where) or [""]
        for row in range(max(len(cells), len(places))):
            first = (finding.level.value, finding.check) if row == 0 else ("", "")
            place = places[row] if row < len(places) else ""
            cell = cells[row] if row < len(cells) else ""
            lines.append(f"{first[0]:<{level}}  {first[1]:<{check}}  {place:<{where}}  {cell}".rstrip())
        lines += [f"    {line}" for line in finding.evidence]
    return "\n".join([*lines, "", summary(ordered)]) + "\n"


def _plain(finding: Finding) -> Finding:
    """Itself, without what a terminal takes for an order: names and reasons come from other hosts, and from files."""
    return replace(
        finding, where=escaped(finding.where), text=escaped(finding.text), todo=escaped(finding.todo),
        evidence=tuple(escaped(line) for line in finding.evidence),
    )  # fmt: skip


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each kind."""
    counts = [
        (sum(finding.level is level for finding in findings), level.value.lower())
        for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)
    ]
    said = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    return ", ".join(said) if said else "all is well"
