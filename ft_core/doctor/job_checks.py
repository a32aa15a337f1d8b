"""What several hosts show: each alone, and all together. Pure.

Invariant: the same on every host, because all have the same facts. What is the same on all hosts is said once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ft_core.doctor import agreement, crossings, host_checks
from ft_core.doctor.findings import EVERYWHERE, by_level

if TYPE_CHECKING:
    from ft_core.doctor.findings import Finding, Level
    from ft_core.doctor.job_facts import JobFacts

CHECKS = (
    agreement.present, agreement.versions, agreement.settings, agreement.numbers, agreement.secrets,
    crossings.addresses, crossings.reach, crossings.routes, crossings.clocks, crossings.rates, crossings.storage,
    agreement.gpus,
)  # fmt: skip


def check(job: JobFacts) -> list[Finding]:
    """Everything that can be said, the worst first."""
    own: dict[tuple[Level, str, str, str], list[str]] = {}
    first: dict[tuple[Level, str, str, str], Finding] = {}
    for facts in job.hosts.values():
        for finding in host_checks.check(facts):
            key = finding.level, finding.check, finding.text, finding.todo
            own.setdefault(key, []).append(facts.name)
            first.setdefault(key, finding)
    alone = []
    for key, names in own.items():
        everywhere = len(names) == len(job.hosts) > 1
        alone.append(dataclasses.replace(first[key], where=EVERYWHERE if everywhere else ", ".join(names)))
    return by_level([*(finding for one in CHECKS for finding in one(job)), *alone])
