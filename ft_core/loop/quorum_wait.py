"""Waiting for a quorum while the others validate or save, and what the lighthouse knows before any Manager does.

How it works. `patiently` makes `Manager.start_quorum` fit for those who come while the others are paused: that forming
a quorum takes longer than `quorum_timeout` then is no error.

Threads: the training thread; `ft_core.control.lighthouse.client.rooms` bounds how long the lighthouse may take.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from ft_core.control.lighthouse.client import rooms
from ft_core.errors import QuorumTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.manager import Manager

T = TypeVar("T")
log = logging.getLogger("ft_core")
TRIES = 3
"""How often a quorum that trains, unpaused, may fail to take this replica in within `quorum_timeout`."""


def others_train(address: str, besides: str) -> bool | None:
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


def patiently(manager: Manager, address: str, start: Callable[[], T]) -> T:
    """Start a quorum, for as long as the others are paused.

    Args:
        manager: of this rank.
        address: of the lighthouse.
        start: calls `start_quorum`, first of all. Returned is what it returns.

    Raises:
        QuorumTimeoutError: and nobody is paused.
    """
    tries = 0
    while True:
        try:
            return start()
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
