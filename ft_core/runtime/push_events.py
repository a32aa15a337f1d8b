"""What a push from the lighthouse, or from group rank 0, means to the machine of a rank. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.pushes import Answer, Busy, Change, Lost, Order, Over, Reason, Refusal
from ft_core.protocol.rank import events as on

if TYPE_CHECKING:
    from ft_core.protocol.pushes import Push


def event_of(push: Push) -> on.Event | None:
    """The event for the machine; None: it is the shell's business alone."""
    match push:
        case Answer():
            return on.QuorumAnswered(push.seq, push.quorum)
        case Reason():
            return on.NoQuorumYet(push.text, push.paused_s)
        case Change():
            return on.ChangePending(push.quorum_id, push.reason)
        case Lost():
            return on.MemberLost(push.quorum_id, push.lost, push.held, push.moves)
        case Busy():
            return on.Paused(push.quorum_id, push.replica_id, push.for_s)
        case Over():
            return on.Superseded(push.quorum_id)
        case Refusal():
            return on.Refused(push.error)
        case Order() if not push.kill:
            return on.DrainOrdered(push.reason)
        case _:
            return None
