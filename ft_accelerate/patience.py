"""What the lighthouse knows, for questions that no Manager can answer yet: who trains, who is paused.

How it works. `patiently` makes `Manager.start_quorum` fit for those who come while the others validate or save:
that forming a quorum takes longer than `quorum_timeout` then is no error.

Threads: the training thread; `ft_core.control.lighthouse.client.rooms` bounds what the lighthouse may take.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from ft_core.control.lighthouse.client import rooms
from ft_core.errors import JobFinishedError, QuorumTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core import Manager

T = TypeVar("T")
log = logging.getLogger("ft_accelerate")
TRIES = 3
"""How often a quorum that trains, unpaused, may fail to take this replica in within `quorum_timeout`."""


def trains_already(address: str, besides: str) -> bool | None:
    """Whether there is a quorum of living members, or all is done; None if the lighthouse cannot be asked.

    Args:
        address: of the lighthouse.
        besides: name of the replica group whose members do not count.
    """
    known = rooms(address) if address else None
    if known is None:
        return None
    return any(
        room.closed
        or any(r.member and r.life == "up" and r.replica_id.partition(":")[0] != besides for r in room.replicas)
        for room in known
    )


def nothing_left(error: JobFinishedError) -> SystemExit:
    """What ends a replica that came after the others had finished: its work is done as well."""
    log.warning("nothing left to train: %s", str(error).partition(";")[0])  # the rest is for who starts lighthouses
    return SystemExit(0)


def start_patiently(manager: Manager, address: str, room: str) -> None:
    """`start_quorum` in a room, for as long as the others are paused. Raises as `patiently`."""
    patiently(manager, address, lambda: manager.start_quorum(room))


def patiently(manager: Manager, address: str, attempt: Callable[[], T]) -> T:
    """What starts a quorum, for as long as the others are paused.

    Args:
        manager: of this rank.
        address: of the lighthouse.
        attempt: calls `start_quorum`, first of all.

    Raises:
        QuorumTimeoutError: and nobody is paused.
        SystemExit: (0) the others have finished, or this replica was asked to drain.
    """
    tries = 0
    while True:
        try:
            return attempt()
        except JobFinishedError as error:
            manager.shutdown(wait=False)
            raise nothing_left(error) from error
        except QuorumTimeoutError:
            paused, trains = _others(manager, address)
            tries += not paused
            if not (paused or trains) or tries >= TRIES:
                raise
            log.info("%s: still waiting: %s", manager.replica_id, paused or "a quorum trains without this replica")


def _others(manager: Manager, address: str) -> tuple[str, bool]:
    """Members that are paused, as text, and whether there are members that are alive at all."""
    known = rooms(address) if address else None
    if known is None:
        return "", False
    up = [r for room in known for r in room.replicas if r.life == "up" and r.replica_id != manager.replica_id]
    texts = [f"{r.replica_id} is paused for at most {r.paused_ms / 1000:.0f} s" for r in up if r.paused_ms]
    return ", ".join(texts), any(r.member for r in up)
