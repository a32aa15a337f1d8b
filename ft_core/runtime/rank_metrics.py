"""The metrics of one rank: what it serves at FT_METRICS, made when its Manager starts, ended when that shuts down.

How it works. Its events are counted (`RankEvents` gives them to the log and to this); how old its lease is, is looked
up when somebody asks. Only rank 0 of a group has metrics, as it alone has events.

Invariants: an address that is in use, or a library that is missing, is a warning, and training goes on.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ft_core.events.schema import REPLICA
from ft_core.metrics.metrics import Metrics
from ft_core.metrics.server import MetricsServer, open_page
from ft_core.metrics.tally import Change, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ft_core.runtime.config import Config

VARIABLE = "FT_METRICS"
_began_before = False
"""A Manager was made in this process: the time since its start is not the next one's."""


def open_metrics(config: Config, last_ack: Callable[[], float]) -> Metrics | None:
    """Begin to count and to serve. None: nobody wants it, or it cannot be.

    Args:
        last_ack: when (monotonic s) the lighthouse acknowledged something last; -inf: never.
    """
    global _began_before
    if not config.metrics or config.rank:
        return None

    def sampled() -> Iterable[Change]:
        age_s = time.monotonic() - last_ack()
        return [Put("ft_lease_age_seconds", age_s)] if age_s < float("inf") else ()

    born = None if _began_before else config.started_at or process_began()
    _began_before = True
    metrics = Metrics(REPLICA, {"replica": config.name}, sampled, born)
    page = open_page([metrics])
    if page is None:
        return None
    server = MetricsServer(page, config.metrics, config.name, VARIABLE, config.admission)
    server.start()
    metrics.ends = server.close
    return metrics


def process_began() -> float:
    """When this process was started (wall clock, seconds); now, where the system does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
