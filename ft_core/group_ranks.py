"""The other ranks of a group, as its rank 0 sees them, and which callers it takes for one of them.

Threads: a `Rank` belongs to the group server's loop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, RefusedError
from ft_core.rpc import Tls

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from ft_core import wire
    from ft_core.client import LeaseSettings
    from ft_core.quorum import Quorum
    from ft_core.serving import Stream


@dataclass
class Rank:
    """One rank, as its leader sees it."""

    stream: Stream | None = None
    incarnation: int = 0
    """Of its process; 0: it has never connected."""
    left: bool = False
    grace: asyncio.TimerHandle | None = None
    answered: tuple[int, Quorum] | None = None
    paused_until: float = 0.0


def unwanted(join: wire.Join, mine: str, world_size: int, ranks: Mapping[int, Rank]) -> Exception | None:
    """Why a caller is not taken for a rank of the group `mine` of `world_size` ranks; None: it is."""
    if join.replica_id != mine:
        return RefusedError(f"this is the group server of {mine}, not of {join.replica_id}: the ranks use two stores")
    if join.world_size != world_size:
        return ConfigError(
            f"group rank {join.rank} of {mine} has world_size={join.world_size}, rank 0 has {world_size}"
        )
    rank = ranks.get(join.rank)
    if rank is None:
        return ConfigError(f"group rank {join.rank} of {mine} is not one of ranks {sorted(ranks)}")
    if rank.stream is not None and rank.incarnation not in (0, join.incarnation):
        return ConfigError(f"two processes of {mine} call themselves group rank {join.rank} (RANK)")
    return None


def group_tls(settings: LeaseSettings) -> Tls | None:
    """A group serves TLS where it has a certificate to show; FT_TLS_CA alone is for the way to the lighthouse."""
    tls = settings.tls or Tls.from_env(os.environ)
    return tls if tls is not None and tls.cert and tls.key else None
