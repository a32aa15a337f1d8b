"""The ranks of a group, as its machine knows them: who is one, who is missing, and the sentences about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ft_core.protocol.types import Quorum

ANY_GROUP = "*"
"""What a rank calls its group that was given nothing but the address of its server."""


@dataclass(slots=True)
class RankRecord:
    """What is known of one rank."""

    incarnation: int = 0
    """Of its process; 0: it has never connected."""
    here: bool = False
    """Its stream is open."""
    left: bool = False
    """It has said goodbye on the stream that was open last."""
    lost_at: float | None = None
    """When it counts as lost, unless its stream is open again before."""
    answered: tuple[int, Quorum] | None = None
    """The seq of its last ask that was answered, and the quorum."""

    def validate(self) -> None:
        """Every invariant."""
        assert not self.here or (self.incarnation and self.lost_at is None), self
        assert not (self.left and self.here), self
        assert not (self.left and self.lost_at is not None), self


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of a rank's stream to its group's leader: who it is."""

    replica_id: str
    rank: int
    world_size: int
    incarnation: int


def unwanted(join: Join, mine: str, world_size: int, ranks: Mapping[int, RankRecord]) -> Exception | None:
    """Why a caller is not taken for a rank of the group `mine` of `world_size` ranks; None: it is."""
    knows = join.replica_id != ANY_GROUP
    if knows and join.replica_id != mine:
        return RefusedError(f"this is the group server of {mine}, not of {join.replica_id}: the ranks use two stores")
    if knows and join.world_size != world_size:
        return ConfigError(
            f"group rank {join.rank} of {mine} has world_size={join.world_size}, rank 0 has {world_size}"
        )
    rank = ranks.get(join.rank)
    if rank is None:
        return ConfigError(f"group rank {join.rank} of {mine} is not one of ranks {sorted(ranks)}")
    if rank.here and rank.incarnation != join.incarnation:
        return ConfigError(f"two processes of {mine} call themselves group rank {join.rank} (RANK)")
    return None


def not_asked(mine: str, absent: Collection[int], ranks: Mapping[int, RankRecord], paused_s: float) -> str:
    """Which ranks of the group `mine` have not asked yet, and what is known of them."""
    text = f"waiting for group rank {', '.join(map(str, absent))} of {mine} to ask"
    gone = [rank for rank in absent if not ranks[rank].here]
    if gone:
        text += f" (not connected: {', '.join(map(str, gone))})"
    return text + (f" (paused, for at most {paused_s:.0f} s more)" if paused_s else "")


def stuck(mine: str, ranks: Mapping[int, RankRecord], asked: Collection[int]) -> str:
    """Why the group `mine` has to end: ranks are away, and others wait for them, not for a quorum; else ''."""
    away = [rank for rank, known in ranks.items() if known.incarnation and not (known.here or known.left)]
    waiting = [rank for rank, known in ranks.items() if known.here and rank not in asked]
    return ends(mine, away, waiting) if away and waiting else ""


def ends(mine: str, away: Sequence[int], waiting: Sequence[int]) -> str:
    """Why the group `mine` ends."""
    return (
        f"group rank {', '.join(map(str, away))} of {mine} is gone or frozen, and rank {', '.join(map(str, waiting))} "
        "has not come to the next step: it waits inside the group, which ends as a whole to be started again"
    )


def leaderless(mine: str, waiting: Sequence[int]) -> str:
    """Why the group `mine` ends whose leader does not answer while these ranks wait for a quorum."""
    return (
        f"group rank 0 of {mine} is frozen or cut off, and rank {', '.join(map(str, waiting))} has asked for the next "
        "quorum, which cannot be had without it: the group ends as a whole to be started again"
    )


def never_came(mine: str, absent: Collection[int], port: int, connect_s: float, world_size: int) -> RefusedError:
    """What all ranks of the group `mine` are told if these never connected."""
    who = f"group rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} of {mine}"
    return RefusedError(
        f"{who} never connected to group rank 0 (port {port}) within connect_timeout={connect_s:g} s: start all "
        f"{world_size} ranks (WORLD_SIZE) of the group, and check that they can reach that port (FT_HOSTNAME, "
        "FT_MANAGER_PORT)"
    )
