"""What torch reads from the environment when it makes an NCCL backend, and what ours needs there.

torch's defaults end the process, or a collective, when it thinks that something takes too long. Ours are aborted by us,
with a flag that is set before, so that no step is committed whose sum was cut short; nobody else may do it.

How it works. `applied()` sets the variables around the making of one backend, which reads them, and puts back what was
there: the script's own NCCL groups keep torch's defaults. They are set whatever is there: launchers set
TORCH_NCCL_ASYNC_ERROR_HANDLING=1 for every worker (torchrun's agent, ftrun's), and no other value can work here.

Invariants: one `applied()` at a time, under a lock; all names are in NEEDED. Threads: any. Between
setting and putting back there is nothing but the backend's constructor; other threads that read the environment in C
at that very moment may see either value.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

NEEDED: dict[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
WHY: dict[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch ends this process when a peer dies, instead of leaving it to the group",
    "TORCH_NCCL_BLOCKING_WAIT": "torch aborts a collective in a wait, and a sum that was cut short may be committed",
    "TORCH_NCCL_ENABLE_MONITORING": "torch ends this process when an abort takes longer than its watchdog's patience",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "torch asks the quorum's store for signals after the quorum has ended",
    "TORCH_NCCL_PROPAGATE_ERROR": "torch asks the quorum's store for signals after the quorum has ended",
}
"""What happens with another value than the one in NEEDED."""

_lock = threading.Lock()
_said = False


def to_set(environment: Mapping[str, str]) -> dict[str, str]:
    """What has to be changed in `environment`. torch reads a new name before its old one. Pure."""
    return {name: value for name, value in NEEDED.items() if environment.get(name) != value}


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Make the NCCL backend in here."""
    with _lock:
        _say_once()
        added = to_set(os.environ)
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _say_once() -> None:
    global _said
    if _said:
        return
    _said = True
    settings = " ".join(f"{name}={value}" for name, value in to_set(os.environ).items())
    if settings:
        logger.info("NCCL between the replicas is made with %s (docs/nccl.md)", settings)
