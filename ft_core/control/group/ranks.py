"""The other ranks of a group, as its rank 0 sees them, and which callers it takes for one of them.

Threads: a `Rank` belongs to the group server's loop.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, ProtocolError, RefusedError
from ft_core.rpc import codec
from ft_core.rpc.channel import Tls

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ft_core.control.lighthouse.lease_client import LeaseSettings
    from ft_core.protocol.types import Ask, Quorum
    from ft_core.rpc.loop_server import Stream

ANY_GROUP = "*"
"""What a rank calls its group that was given nothing but the address of its server."""


@dataclass
class Rank:
    """One rank, as its leader sees it."""

    stream: Stream | None = None
    incarnation: int = 0
    """Of its process; 0: it has never connected."""
    left: bool = False
    grace: asyncio.TimerHandle | None = None
    answered: tuple[int, Quorum] | None = None


async def read_join(stream: Stream, within_s: float) -> codec.Join | Exception | None:
    """The first message of a stream; or why it is none; None: the stream ended without one."""
    try:
        first = await asyncio.wait_for(stream.read(), within_s)
        join = codec.decode_group_request(first) if first is not None else None
    except ProtocolError as error:
        return error
    except asyncio.TimeoutError:
        return ProtocolError("nothing was said on this stream")
    if join is None or isinstance(join, codec.Join):
        return join
    return ProtocolError("the first message of a rank must be a Join")


def unwanted(join: codec.Join, mine: str, world_size: int, ranks: Mapping[int, Rank]) -> Exception | None:
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
    if rank.stream is not None and rank.incarnation not in (0, join.incarnation):
        return ConfigError(f"two processes of {mine} call themselves group rank {join.rank} (RANK)")
    return None


def named(said: codec.RankAsk, mine: str, world_size: int) -> tuple[Ask, str | None]:
    """A rank's ask and room. It need not know what its group is called and how many ranks it has."""
    ask = said.ask
    if ask.replica_id == ANY_GROUP:
        ask = replace(ask, replica_id=mine, group_world_size=world_size)
    return ask, said.room or None


def not_asked(mine: str, absent: Collection[int], ranks: Mapping[int, Rank], paused_s: float) -> str:
    """Which ranks of the group `mine` have not asked yet, and what is known of them."""
    text = f"waiting for group rank {', '.join(map(str, absent))} of {mine} to ask"
    gone = [rank for rank in absent if rank in ranks and ranks[rank].stream is None]
    if gone:
        text += f" (not connected: {', '.join(map(str, gone))})"
    return text + (f" (paused, for at most {paused_s:.0f} s more)" if paused_s else "")


def never_came(mine: str, absent: Collection[int], port: int, connect_s: float, world_size: int) -> RefusedError:
    """What all ranks of the group `mine` are told if these never connected."""
    who = f"group rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} of {mine}"
    return RefusedError(
        f"{who} never connected to group rank 0 (port {port}) within connect_timeout={connect_s:g} s: start all "
        f"{world_size} ranks (WORLD_SIZE) of the group, and check that they can reach that port (FT_HOSTNAME, "
        "FT_MANAGER_PORT)"
    )


def group_tls(settings: LeaseSettings) -> Tls | None:
    """What the ranks of a group talk over. Raises ConfigError if they would do it in clear though TLS is on."""
    tls = settings.tls or Tls.from_env(os.environ)
    return None if tls is None else tls.check_serves("the ranks of this group would talk")
