"""A death that finds an attempt open, and nothing of it launched: the attempt goes on in the next quorum (R19). Pure.

How it works. What a rank computes in its forward pass depends on the state the attempt builds on, not on who takes
part: that is looked at when the first gradient is launched. So a rank that learns of a death before asks for the next
quorum at once, while forward runs, and launches there; nothing is computed again. State can be given and taken at step
boundaries only, so a quorum in which somebody needs any is left again, and the attempt is lost, as one is that had
launched something. The ranks of a group are at different places of their step when one of them learns it: they go on
together, or lose the attempt together (R12, `protocol.group.moving`).

Invariants: an attempt that moves builds on the version and lineage of the new quorum, and nobody was told who takes
part in it (`Attempt.pinned`). The batch that is sent with an ask is this rank's own until a quorum stands in which
others are further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import ConfigError
from ft_core.protocol.rank.phases import Heal

if TYPE_CHECKING:
    from ft_core.protocol.rank.attempt import Attempt
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.settings import RankSettings
    from ft_core.protocol.types import Ask, Quorum


IN_TIME = 0.75
"""Of `timeout`: an attempt that has been open for longer may be what the others gave up waiting for."""


def may_move(attempt: Attempt, settings: RankSettings, now: float) -> bool:
    """Whether the attempt, of which nothing was launched, can go on in the next quorum, should this one end now.

    Not if the others may have ended it because of this very rank, which has not come to its gradients for so long: they
    would wait for it in the next quorum, too.

    A script that makes collectives of its own before its gradients' may make them whenever the quorum is new: all
    members then do, and one in the middle of a step does not. That it makes none there shows in the first completed
    attempt of a quorum. Those that follow the gradients, or the vote, are made by all in the same place.
    """
    return (
        settings.rules.r19_moves and (settings.group_world_size == 1 or settings.rules.r19_groups)
        and not attempt.pinned
        and attempt.number > 0 and not (attempt.early_ops or attempt.op_launched)
        and attempt.heal is Heal.NONE and not attempt.behind
        and now - attempt.opened_at < IN_TIME * settings.timeout_s
        and not (attempt.soft_error or attempt.awaits_lease)
    )  # fmt: skip


def older_version(quorum: Quorum, sent: Ask) -> ConfigError | None:
    """The error where the position in the data that was sent with an ask has not come back with its quorum."""
    mine = next((member for member in quorum.members if member.replica_id == sent.replica_id), None)
    if mine is None or mine.position >= sent.position or not sent.position:
        return None
    return ConfigError(
        f"{sent.replica_id} sent where it is in its data, and the quorum came without it: the lighthouse, or group "
        "rank 0, runs an older version of ft_core. Run the same version everywhere"
    )


def why_not_here(plan: Plan, position: int, settings: RankSettings) -> str:
    """Why an attempt that was open cannot go on in this quorum; '': it can.

    Args:
        plan: of the quorum.
        position: the batch of the training data that the attempt was begun with; 0: of none that others know.
        settings: of this rank.
    """
    if plan.healing:
        return "in this quorum members need state, which is given and taken between two steps only"
    if position and plan.position != position and settings.rules.r19_positions:
        return "in this quorum members go on at another batch of their data, which is begun with a step only"
    return "this replica is not counted on in this quorum" if plan.excluded else ""
