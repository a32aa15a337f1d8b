"""Who does what in a quorum: ranks, participants, who heals and from whom. Pure; every member computes the same.

`plan(quorum, replica_id, ...)` is the only function. The truth is the newest version (DESIGN 3.5); among several
lineages at that version, the one most groups hold, then the one of the lowest rank. Everybody else heals from groups
that hold exactly the truth. At step 0 with `init_sync` every random initialisation is its own lineage, so all heal from
one group, and since that happens before anything is launched, all of them participate in the first step. Whose last
heal failed (`heals_late`) is not counted on before it is healed.

Invariant: the plan depends only on its arguments, never on who computes it, except for the fields that say "mine".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.protocol.types import Member, Quorum, Version


class WorldSizeMode(Enum):
    """How the number of participants follows the number of members.

    DYNAMIC: every healthy member participates. FIXED_WITH_SPARES: exactly `min_replica_size` participate, the others
    are spares that contribute zeros and take over when a participant is lost.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One member's view of its quorum. Ranks are replica_ranks; versions are those of the newest state."""

    quorum: Quorum
    replica_rank: int
    target: Version
    target_lineage: int
    holders: tuple[int, ...]
    """Ranks that hold that state already, in order."""
    healing: tuple[int, ...]
    """Ranks that receive state in this quorum, in order."""
    heals_first: bool
    """I heal before anything is launched (step 0, or a synchronous quorum), so I participate at once."""
    participants: tuple[int, ...]
    """Ranks that contribute gradients in the first attempts of this quorum."""
    participants_healed: tuple[int, ...]
    """Ranks that contribute once every planned heal was reported ready (R10)."""
    ready_expected: int
    """How many members raise `ready` in the attempt that ends the healing phase."""
    donors: tuple[int, ...]
    """For a healing member: ranks to receive from, preferred first. Empty otherwise."""
    relays: tuple[int, ...]
    """For a healing member: ranks that heal, too, and pass on what they have received. They come before it in a binary
    tree over all that heal, so that no donor need send its state to everybody. Empty where donors are enough."""
    position: int
    """The furthest batch that one who holds that state trains on next, at which all go on; 0: none of them says."""
    excluded: bool
    """Behind the newest state with allow_heal=False: waits, contributes nothing, never commits (R13)."""

    @property
    def quorum_id(self) -> int:
        """Id of the quorum this plan is for."""
        return self.quorum.quorum_id

    @property
    def size(self) -> int:
        """replica_world_size: number of members."""
        return len(self.quorum.members)

    @property
    def heals(self) -> bool:
        """This member receives state in this quorum."""
        return self.replica_rank in self.healing

    @property
    def first_holder(self) -> int:
        """Lowest of the ranks that hold the state: it leads, where one member does something for all."""
        return self.holders[0]

    @property
    def store_address(self) -> str:
        """c10d store of the quorum: that of its first member."""
        return self.quorum.members[0].store_address


def plan(
    quorum: Quorum,
    replica_id: str,
    *,
    mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
    min_replicas: int = 1,
) -> Plan:
    """Compute this member's plan.

    Args:
        quorum: the quorum, as announced; at least one member holds a usable state.
        replica_id: whose plan.
        mode: same on all members.
        min_replicas: number of participants under FIXED_WITH_SPARES.

    Raises:
        ValueError: `replica_id` is not in the quorum.
    """
    members = quorum.members
    me = next((rank for rank, member in enumerate(members) if member.replica_id == replica_id), None)
    if me is None:
        raise ValueError(f"{replica_id} is not a member of quorum {quorum.quorum_id}")
    heal_allowed = all(member.allow_heal for member in members)
    target = max(member.version for member in members)
    lineage = _truth(members, target, heal_allowed)
    holders = [r for r, m in enumerate(members) if m.version == target and (lineage is None or m.lineage == lineage)]
    behind = [r for r in range(len(members)) if r not in holders]
    target_lineage = members[holders[0]].lineage if lineage is None else lineage
    healing = tuple(behind) if heal_allowed else ()

    initial = target.step == 0
    first = [r for r in healing if (initial or members[r].heals_before_forward) and not members[r].heals_late]
    late = [r for r in healing if r not in first]
    now = sorted(holders + first)
    after = sorted(holders + list(healing))
    if mode is WorldSizeMode.FIXED_WITH_SPARES:
        # Who holds the state comes first: a member whose heal fails must not be the one that counts (R11).
        now = sorted((holders + first)[:min_replicas])
        after = sorted((holders + list(healing))[:min_replicas])

    mine = me in healing
    donors: tuple[int, ...] = ()
    relays: tuple[int, ...] = ()
    if mine:
        place = healing.index(me)
        turn = place % len(holders)
        donors = tuple(holders[turn:] + holders[:turn])
        if len(healing) > len(holders):
            relays = tuple(healing[above] for above in _above(place))
    return Plan(
        quorum=quorum,
        replica_rank=me,
        target=target,
        target_lineage=target_lineage,
        holders=tuple(holders),
        healing=healing,
        heals_first=mine and me in first,
        participants=tuple(now),
        participants_healed=tuple(after),
        ready_expected=len(late),
        donors=donors,
        relays=relays,
        position=max(members[rank].position for rank in holders),
        excluded=not heal_allowed and me in behind,
    )


def _above(place: int) -> list[int]:
    """The parent and the grandparent of a place in a binary tree, as far as there are any."""
    parent = (place - 1) // 2
    return [at for at in (parent, (parent - 1) // 2) if at >= 0] if place else []


def _truth(members: tuple[Member, ...], target: Version, heal_allowed: bool) -> int | None:
    """The lineage to follow among those at the newest version; None where differing lineages are not to be compared."""
    top = [member for member in members if member.version == target]
    if target.step == 0 and (not heal_allowed or not all(member.init_sync for member in members)):
        return None
    count = Counter(member.lineage for member in top)
    most = max(count.values())
    return next(member.lineage for member in top if count[member.lineage] == most)
