"""A finding: what was looked at, where, what it means and what to do about it. Pure.

Invariants: a finding that is not OK says what to do. Findings are sorted by how bad they are, else as they were found.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

EVERYWHERE = "all hosts"


class Level(Enum):
    """How bad it is."""

    OK = "OK"
    NOTE = "NOTE"
    """Good to know; nothing is wrong."""
    WARNING = "WARNING"
    """The job will run, but worse than it could, or until something happens."""
    PROBLEM = "PROBLEM"
    """The job will not run, or not with this host."""


STATUS = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 1, Level.PROBLEM: 2}
"""The exit status that a finding leads to."""
ORDER = (Level.PROBLEM, Level.WARNING, Level.NOTE, Level.OK)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    check: str
    """What was looked at, in a word or two."""
    where: str
    """The host, or hosts, that it is about."""
    text: str
    """What was seen, and what that means."""
    todo: str = ""
    evidence: tuple[str, ...] = ()
    """Lines that show it."""

    def __post_init__(self) -> None:
        assert self.level is Level.OK or self.todo, f"{self.check}: says not what to do"

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "level": self.level.value, "evidence": list(self.evidence)}


def ok(check: str, where: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(Level.OK, check, where, text)


def note(check: str, where: str, text: str, todo: str) -> Finding:
    """Good to know."""
    return Finding(Level.NOTE, check, where, text, todo)


def warning(check: str, where: str, text: str, todo: str) -> Finding:
    """Something will be worse than it could."""
    return Finding(Level.WARNING, check, where, text, todo)


def problem(check: str, where: str, text: str, todo: str) -> Finding:
    """The job will not run."""
    return Finding(Level.PROBLEM, check, where, text, todo)


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.level))


def status(findings: Iterable[Finding]) -> int:
    """0: all is well; 1: warnings; 2: problems."""
    return max((STATUS[finding.level] for finding in findings), default=0)
