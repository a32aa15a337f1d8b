"""What the lighthouse knows, for questions that no Manager can answer yet: who trains, who is paused.

Threads: the calling one; at most STATUS_S per call, twice.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from ft_core.errors import FaultToleranceError
from ft_core.lighthouse_client import LighthouseClient

if TYPE_CHECKING:
    from ft_core._pb import coordination_pb2 as pb

log = logging.getLogger("ft_lightning")
STATUS_S = timedelta(seconds=5)
"""How long the lighthouse may take to be reached, and to answer."""


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
