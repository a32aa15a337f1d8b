"""The state that a rank holds, by its name: which version of which lineage, and what is known of it. Pure.

Invariants: `version` is VOID while the state must not be used (torn by a heal, or by an optimizer that raised);
`stable` is held by every member of the quorum and is never newer than what this rank has seen committed.
Ownership: written by the rank's machine only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.protocol.types import UNTRAINED, VOID

if TYPE_CHECKING:
    from ft_core.protocol.types import Verdict, Version


@dataclass(slots=True)
class Held:
    """What one rank holds."""

    lineage: int
    """Hash over the history of the state: equal on two ranks only if their states are."""
    version: Version = UNTRAINED
    stable: Version = VOID
    """The newest version that every member of the quorum is known to hold (R6)."""
    batches_committed: int = 0
    """Gradients in all commits that led to it: one per participant and step."""
    commit_weight: int = 0
    """Sum of weights in the commit that made `version`; 0: unknown (none was made, or a checkpoint was loaded)."""
    restored: bool = False
    """A checkpoint was loaded: it may begin where the job has no state any more (R21)."""

    def committed(self, version: Version, lineage: int, verdict: Verdict) -> None:
        """The optimizer is to make `version` of it now."""
        self.version, self.lineage = version, lineage
        self.batches_committed += verdict.contributors
        self.commit_weight = verdict.weight

    def healed(self, version: Version, lineage: int, batches: int, weight: int) -> None:
        """A donor's state was loaded; the last two numbers are the donor's."""
        self.version, self.lineage = version, lineage
        self.batches_committed, self.commit_weight = batches, weight
