"""Why a process group could not be built: whether that is this replica's own doing, and what the others are told.

How it works. What a peer or the network does to a replica arrives as an error of the operating system, as a timeout,
or, out of torch's C++, as a RuntimeError. What our own groups know to be this machine's doing, they say
(`ThisMachineError`, `ConfigError`). Anything else was raised by Python code here, such as a NameError in a process
group of the user's own: it will raise that again, whatever the others do. The lighthouse holds back whose own doing it
is (`build_backoff`).

Threads: any; nothing is kept.
"""

from __future__ import annotations

import logging
from concurrent.futures import TimeoutError as FutureTimeoutError

from ft_core.errors import ConfigError, FaultToleranceError, ThisMachineError, UsageError

log = logging.getLogger("ft_core")
OWN = (ConfigError, UsageError, ThisMachineError, NotImplementedError, RecursionError)
"""The replica's own doing, though some of these are RuntimeErrors."""
OF_OTHERS = (RuntimeError, OSError, EOFError, FutureTimeoutError)
"""What else may be anybody's; the last one is no TimeoutError before Python 3.11."""


def is_own(error: Exception) -> bool:
    """Whether the reason is this replica, whatever the others do."""
    return isinstance(error, OWN) or not isinstance(error, OF_OTHERS)


def explain(replica_id: str, error: Exception) -> tuple[str, bool]:
    """(what the others are told, whether it is this replica's own doing). A mistake in Python code is logged here."""
    own = is_own(error)
    if not own or isinstance(error, FaultToleranceError):
        return str(error) or type(error).__name__, own
    log.warning("%s: its process group could not be built", replica_id, exc_info=error)
    return f"{type(error).__name__}: {error}", own
