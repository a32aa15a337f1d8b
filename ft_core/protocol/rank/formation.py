"""One wait for a quorum: what is asked for, until when, and what is to be done meanwhile. Pure.

How it works. A formation begins with the wish of a script that needs a quorum, and ends with process groups that
stand, or with the reason why there is none. In between the rank asks; where the process groups cannot be built, or the
quorum ends before they are, it asks again after a short pause, in which the messages arrive that explain the failure.
The limit is one for all of it, and announced pauses extend it.

Invariants: at most one ask is open; `next_at` is the only timer. Ownership: as `rank`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.protocol.pauses import Wait
    from ft_core.protocol.rank.phases import MustAsk
    from ft_core.protocol.types import Ask

TELL_S = 1.0
"""A wait for a quorum shorter than this is nobody's concern; a longer one is reported with its reason."""
GIVEN_WITHIN = 0.5
"""Of the time that a quorum may take: so long a newcomer waits for live state that nobody gives. Running members give
it at their next step boundary; but they may wait for a quorum with this newcomer themselves, or be gone without a
word, and then others that wait for it would give up first."""
ASK_AGAIN_S = 0.01
"""Between two asks of one formation: lets the messages arrive that explain why the first quorum failed."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a script wants of the next quorum."""

    template: Ask
    """The addresses and flags that are not the machine's business; it completes them."""
    room: str
    """The quorum namespace."""
    timeout_s: float
    """How long all of it may take, from the first ask on."""
    prefetch: bool = False
    """Live state is copied from running members before the first ask."""
    hands_over: bool = False
    """This replica drains, and asks all the same: another member may lack its last commit (R16)."""


@dataclass(slots=True)
class Formation:
    """One wait for a quorum."""

    why: MustAsk
    wish: Wish
    wait: Wait
    moves: bool = False
    """An attempt that is open goes on in this quorum (R19), unless somebody needs state there."""
    again: bool = False
    """A quorum of this formation has ended before its process groups stood."""
    sent: Ask | None = None
    """The ask that is open."""
    asked_at: float = -math.inf
    """When it was first sent."""
    send_at: float = math.inf
    """When the next ask goes out (monotonic s)."""
    look_at: float = math.inf
    """When to look again to whom of the last quorum a connection can be opened."""
    tell_at: float = math.inf
    """When to report why there is no quorum yet, if there is a new reason."""
    told: str = ""

    @property
    def prefetching(self) -> bool:
        """Nothing was asked for yet: live state is being copied, which has a limit of its own."""
        return self.sent is None and self.send_at == math.inf

    @property
    def next_at(self) -> float:
        """When something is to be done, if nothing happens before (monotonic s)."""
        if self.prefetching:
            return math.inf
        return min(self.send_at, self.wait.at, self.look_at, self.tell_at)
