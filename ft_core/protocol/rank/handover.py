"""What a member that is to leave still owes the others (R16). Pure: no clock, no I/O.

Theory of operation. Who leaves a quorum that stands says so in a last fence, and all that it holds others hold, too.
Where the quorum broke that is not known: another member's fence may have ended with the connections of a third that
died, so the one that leaves may be the only one that holds the last commit. It enters one more quorum, in which the
others are healed, and leaves that.

Invariant: nobody is asked for who is not there; how long to wait is the caller's. Ownership: as `rank`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.rank.phases import MustAsk
from ft_core.protocol.types import VOID

if TYPE_CHECKING:
    from ft_core.protocol.rank.rank import Step


def hands_over(step: Step) -> MustAsk | None:
    """Why a rank that is to leave asks for one more quorum first; None: it does not.

    Not in groups of several ranks: those end with the order to drain, and ask no more.
    """
    if step.plan is None or step.plan.size == 1 or step.settings.group_world_size > 1:
        return None
    why = step.boundary()
    known = step.version <= step.stable or step.version == VOID or step.behind
    return why if isinstance(why, MustAsk) and why.failed and not known else None
