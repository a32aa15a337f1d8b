"""The rule that a job which has committed does not begin again at step 0 unasked (R21). Pure.

How it works. When a quorum could form of which nobody holds a committed step, although replicas of the room have
committed some, what was trained is somewhere else or lost. Members of the last quorum that may live are waited for, as
holders of newer state are (R2), and for OTHERS_S groups that have not come yet: one may have a checkpoint. When nobody
is left to wait for, those who ask are refused, in words that name how the job can go on: from a checkpoint, or from the
start if that is wanted.

Of two lighthouses, members of a quorum that either of them knows are waited for; and as they may have had leases at the
other one until the two met, the time for which they may be away counts from then, if not from later (R22).

Who has loaded a checkpoint, of whatever step, or may begin by its user's will (`Manager(from_scratch=True)`, which
strategy and plugin pass on, or FT_FROM_SCRATCH), asks with `from_scratch`; one that does is enough.

Who was receiving the state when its last holder was lost holds half of it, and can neither train nor begin. If nobody
who asks holds anything else they are refused likewise, where one may begin with other words: its next start can.

Invariant: a quorum in which somebody holds a committed step is never touched. Ownership: `room.Room` only.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import Refuse
from ft_core.protocol.lighthouse.quorum_rule import orphaned_at
from ft_core.protocol.lighthouse.reasons import UNTIL, story
from ft_core.protocol.lighthouse.view import Formed, Life, NotReady, Seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.protocol.lighthouse.view import View
    from ft_core.protocol.types import Ask

OTHERS_S = 5.0
"""How long others are waited for, from the first ask on."""
SAY_SO = (
    "from_scratch=True (FaultTolerantStrategy, FaultTolerancePlugin, Manager), --ft_from_scratch true (ft-accelerate "
    "launch), --from-scratch (ftrun), FT_FROM_SCRATCH=1"
)
"""The option of each interface that lets a job begin again."""


def not_again(outcome: Formed | NotReady, view: View, furthest: int) -> tuple[Formed | NotReady, list[Refuse]]:
    """Hold up a quorum that would begin again, or replicas that all hold half a state; returns also who is refused.

    Args:
        outcome: what `quorum_rule.decide` answers: `Formed`, or `NotReady` with `void`.
        view: the room.
        furthest: the last step that a member of the room's last quorum is known to have committed; 0: none.
    """
    asks = outcome.asks if isinstance(outcome, Formed) else outcome.void
    lost = furthest > 0 and all(ask.version.step <= 0 and not ask.from_scratch for ask in asks)
    if not view.rules.r21_not_again or (isinstance(outcome, Formed) and not lost):
        return outcome, []
    waiting = _holder(view, furthest) or _others(asks, view, furthest)
    if waiting is not None:
        return waiting, []
    if lost:
        reason = (
            f"this job has committed {furthest} step{'' if furthest == 1 else 's'}, and everybody who held them is "
            "gone: without a checkpoint it would begin again at step 0. Resume from one (Lightning: "
            "fit(ckpt_path=...), Accelerate: load_state, else Manager.load_state_dict before the first step). If it "
            f"shall begin from scratch: {SAY_SO}, or another lighthouse or room"
        )
    else:
        assert isinstance(outcome, NotReady)
        reason = (
            f"{outcome.reason}, and everybody who held it is gone: only a new start of this replica can begin again"
        )
    return NotReady(reason, None), [Refuse(ask.replica_id, reason, lost=lost) for ask in asks]


def _holder(view: View, furthest: int) -> NotReady | None:
    """A member of the last quorum, here or at the other lighthouse, that may still hold what was trained."""
    members = view.current.members if view.current else ()
    for replica_id in dict.fromkeys((*members, *view.holders)):
        seen = view.seen.get(replica_id) or Seen(replica_id, Life.UNKNOWN, since=-inf)
        if seen.life is Life.GONE or (seen.up and seen.ask is not None):
            continue
        at = orphaned_at(view, (replica_id,))
        if at is None or view.now < at:
            return NotReady(
                f"{replica_id} may hold step {furthest}, those who ask hold none ({story(view, seen)})"
                + ("" if at is None else f"; {UNTIL} it has been away for {view.orphan_s:g} s (orphan_s)"),
                at,
                (replica_id,),
            )
    return None


def _others(asks: Sequence[Ask], view: View, furthest: int) -> NotReady | None:
    """Groups that have not come: one of them may have a checkpoint."""
    asked = [seen.asked_at for ask in asks if (seen := view.seen.get(ask.replica_id)) is not None]
    since = max(min(asked), view.current.ended_at if view.current else 0.0)
    if view.expected and len(asks) >= view.expected:
        return None
    if view.now >= since + OTHERS_S:
        return None
    none = f"none of the {furthest} steps that this job has committed" if furthest else "no usable state"
    return NotReady(
        f"those who are here hold {none}; waiting for {OTHERS_S:g} s for others, who may have a checkpoint",
        since + OTHERS_S,
    )
