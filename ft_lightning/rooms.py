"""What the lighthouse knows, for questions that no Manager can answer yet: who trains, who is paused.

Threads: the calling one; at most STATUS_S per call, twice.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from ft_core.errors import FaultToleranceError
from ft_core.lighthouse_client import LighthouseClient
from ft_core.settings import room_of_run, run_of_room

if TYPE_CHECKING:
    from ft_core._pb import coordination_pb2 as pb

log = logging.getLogger("ft_lightning")
STATUS_S = timedelta(seconds=5)
"""How long the lighthouse may take to be reached, and to answer."""


class Runs:
    """Training runs of this process. All replicas run one script, so the nth of each is the same: it has its room."""

    def __init__(self) -> None:
        self.ended = 0
        """How many calls of `fit` came to their end. One that failed is tried again in its room."""

    def __repr__(self) -> str:
        return f"Runs({self.ended} ended)"

    @property
    def room(self) -> str:
        """Of the run that is under way, or next."""
        return room_of_run(self.ended)

    def later(self, address: str) -> bool:
        """A later run than this one is under way at the lighthouse."""
        known = rooms(address) or []
        return any(run_of_room(r.room) > self.ended and any(m.life == "up" for m in r.replicas) for r in known)


RUNS = Runs()


def rooms(address: str) -> list[pb.RoomStatus] | None:
    """All rooms; None if the lighthouse at `address` cannot be asked."""
    try:
        client = LighthouseClient(address, STATUS_S)
        try:
            return list(client.status(STATUS_S).rooms)
        finally:
            client.close()
    except FaultToleranceError as error:
        log.info("the lighthouse could not be asked who trains: %s", error)
        return None
