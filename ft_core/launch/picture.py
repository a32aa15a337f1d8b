"""`Picture`: what the lighthouse has told of our groups, as of one moment. Pure.

The lighthouse sends one when something has changed, and twice a second otherwise (less often where very many ask): one
that is older than OLD_S is old, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

OLD_S = 1.4
"""After so long without a new one, a picture says how old it is."""


@dataclass(frozen=True)
class Seen:
    """The lighthouse's picture of one group."""

    replica_id: str
    alive: bool
    member: bool
    step: int
    phase: str
    committed: bool
    stalled: str
    at: float
    """Monotonic seconds at which this was asked."""


@dataclass(frozen=True)
class Picture:
    """Everything at one time."""

    at: float = 0.0
    groups: tuple[tuple[str, tuple[Seen, ...]], ...] = ()
    members: int = 0
    reason: str = ""
    closed: str = ""

    def title(self, total: int, now: float) -> str:
        """The line above the status lines: how many train, why there is no quorum; and how old it is, once it is old.

        `total`: the groups of the job; 0: not known.
        """
        of_total = f"of {total} " if total else ""
        reason = f": {self.reason}" if self.reason else ""
        age_s = now - self.at
        old = f" ({age_s:.0f} s ago; the lighthouse has not answered since)" if self.at and age_s > OLD_S else ""
        return f"{self.members} {of_total}groups in the quorum{reason}{old}"

    def of(self, name: str) -> tuple[Seen, ...]:
        """All runs of a group that the lighthouse remembers."""
        return dict(self.groups).get(name, ())

    def now(self, name: str, ended: Collection[str] = ()) -> Seen | None:
        """The living run of a group. `ended`: replica_ids whose processes ended, whatever the lighthouse believes."""
        return next((seen for seen in self.of(name) if seen.alive and seen.replica_id not in ended), None)
