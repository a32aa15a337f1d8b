"""What several hosts have found out together, and who among them differs. Pure.

Values that have to be equal are grouped: the hosts that differ from most others are named, or all, where there is no
majority.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_core.doctor.findings import EVERYWHERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ft_core.doctor.facts import HostFacts, Probe, Seen


@dataclass
class JobFacts:
    """What was found out by all hosts, each by its index."""

    expected: int
    hosts: dict[int, HostFacts] = field(default_factory=dict)
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds ahead of the meeting's, and how wrong that may be."""
    reach: dict[int, dict[int, Probe]] = field(default_factory=dict)
    """From whom, to whom."""
    rates: dict[int, tuple[float, str]] = field(default_factory=dict)
    """Bytes per second to the next host, and why there are none. Empty: not tried."""
    rates_skipped: str = ""
    """Why not."""
    stored: dict[int, Seen] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    """Those that went before the end."""

    def names(self, indexes: Iterable[int]) -> str:
        """Those hosts, or that it is all of them."""
        chosen = set(indexes)
        if len(chosen) == len(self.hosts) > 1:
            return EVERYWHERE
        names = [self.hosts[index].name if index in self.hosts else f"host {index}" for index in chosen]
        return ", ".join(sorted(names, key=_natural))

    def machines(self) -> int:
        """How many there are."""
        return len({facts.machine for facts in self.hosts.values()})


def _natural(name: str) -> list[tuple[int, str]]:
    """For sorting: node2 before node10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def differing(job: JobFacts, value: Callable[[HostFacts], str]) -> tuple[list[int], dict[str, list[int]]]:
    """The hosts that differ from most others (all, where most do not agree), and who has which value."""
    by_value: dict[str, list[int]] = {}
    for index, facts in job.hosts.items():
        by_value.setdefault(value(facts), []).append(index)
    return odd_ones(by_value), by_value


def odd_ones(by_value: Mapping[str, list[int]]) -> list[int]:
    """Those that differ from most others; all, where most do not agree; nobody, where all do."""
    if len(by_value) < 2:
        return []
    most = max(len(indexes) for indexes in by_value.values())
    usual = [indexes for indexes in by_value.values() if len(indexes) == most]
    majority = usual[0] if len(usual) == 1 else []
    return sorted(index for indexes in by_value.values() for index in indexes if index not in majority)


def told(job: JobFacts, by_value: Mapping[str, list[int]]) -> str:
    """Who has which value, the commonest first."""
    ordered = sorted(by_value.items(), key=lambda one: (-len(one[1]), one[0]))
    return "; ".join(f"{value or 'nothing'} on {job.names(indexes)}" for value, indexes in ordered)
