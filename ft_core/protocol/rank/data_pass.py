"""A pass over the data, as one rank sees it: who is out of data, who makes commits all the same, when it ends. Pure.

How it works. A pass ends when every member is out of data, or one ends it for all. A member that is out of data
contributes zeros meanwhile; if nothing applies the others' commits there (`trails`), it is healed before the pass may
end. Who missed the end learns it from those who passed it.

Invariant: `ended_at` is the same on all members that hold that version or a later one. Ownership: as `rank`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.protocol.rank.commit_rule import Judgement
    from ft_core.protocol.types import Version


@dataclass(slots=True)
class DataPass:
    """What a rank knows of it."""

    exhausted: bool = False
    """Nobody computes a gradient here in this attempt."""
    trails: bool = False
    """Out of data, and nobody applies commits here: a heal makes up for it."""
    ends_for_all: bool = False
    other_trails: bool = False
    """Another rank of this group trails."""
    passes: int = 0
    """How often one ended since this rank started."""
    ended_at: Version | None = None
    """The version at which the last one ended."""
    everyone_out: bool = False
    """The last fence said: all are out of data; the buffers' source is; the pass ends; it had ended before."""
    source_lost: bool = False
    ends_now: bool = False
    passed: bool = False
    source_shift: int = 0
    """The buffers' source is this many places behind the first participant: those before it are out of data."""

    def run_out(self, *, applies: bool, ends: bool) -> None:
        """This rank has no data in this attempt. `applies`: it makes the others' commits; `ends`: it ends for all."""
        self.exhausted, self.trails, self.ends_for_all = True, not applies, ends

    def ran_out(self) -> None:
        """The attempt without data is over."""
        self.exhausted = self.trails = self.ends_for_all = False

    def judged(self, found: Judgement) -> None:
        """What a fence said."""
        self.everyone_out, self.source_lost = found.everyone_out, found.source_lost
        self.ends_now, self.passed = found.ends_now, found.passed

    def healed(self, base: Version, ended_at: Version | None) -> None:
        """The state `base` was loaded; its donor, who may have missed the end itself, knows of this one."""
        ended_at = base if self.passed else ended_at
        if ended_at != self.ended_at:
            self.passes, self.ended_at = self.passes + 1, ended_at

    def settled(self, exhausted: bool, before: Version, base: Version) -> None:
        """An attempt on `before` is over, which made `base`; `exhausted`: the pass has ended, or had before."""
        if exhausted:
            self.passes += 1
            self.ended_at = base if self.ends_now else before
        self.source_shift += self.source_lost
