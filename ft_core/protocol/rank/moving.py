"""A death that finds an attempt open, and nothing of it launched: the attempt goes on in the next quorum (R19). Pure.

Theory of operation. What a rank computes in its forward pass depends on the state the attempt builds on, not on who
takes part: that is looked at when the first gradient is launched. So a rank that hears of a death before asks for the
next quorum at once, while forward runs, and launches there; nothing is computed again. State can be given and taken
at step boundaries only, so a quorum in which somebody needs any is left again, and the attempt is lost, as one is
that had launched something.

Invariants: an attempt that moves builds on the version and lineage of the new quorum; nobody was told who takes part
in it (the caller's part: `Session.movable`). Ownership: as `rank`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.rank.phases import Heal, Phase

if TYPE_CHECKING:
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.rank import Step


IN_TIME = 0.75
"""Of `timeout`: an attempt that has been open for longer may be what the others gave up waiting for."""


def may_move(step: Step, open_s: float, timeout_s: float) -> bool:
    """Whether the open attempt can go on in the next quorum, should this one end now.

    Not if the others may have ended it because of this very rank, which has not come to its gradients for `open_s`
    seconds: they would wait for it in the next quorum, too. `timeout_s` is how long a collective waits for a peer.

    A script that makes collectives of its own may make them whenever the quorum is new: all members then do, and one
    in the middle of a step does not. That one makes none shows in the first completed attempt of a quorum. The ranks
    of a group are at different places of their step when one of them hears it: they lose the attempt together (R12).
    """
    return (
        step.settings.rules.r19_moves and step.phase is Phase.OPEN and step.attempt > 0 and step.user_ops == 0
        and step.settings.group_world_size == 1 and step.heal is Heal.NONE and not step.behind
        and open_s < IN_TIME * timeout_s
        and not (step.ask_next or step.soft_error or step.awaits_lease)
        and not (step.departure.leaving or step.departure.drain_wanted)
    )  # fmt: skip


def why_not_here(plan: Plan) -> str:
    """Why an attempt that was open cannot go on in this quorum; '': it can."""
    if plan.healing:
        return "in this quorum members need state, which is given and taken between two steps only"
    return "this replica is not counted on in this quorum" if plan.excluded else ""
