"""What torch reads from the environment when it makes an NCCL backend, and what ours needs there.

torch's defaults end the process, or a collective, when it thinks that something takes too long. Ours are aborted by us,
with a flag that is set before, so that no step is committed whose sum was cut short; nobody else may do it.

How it works. `applied()` sets the variables around the making of one backend, which reads them, and puts back what was
there: the script's own NCCL groups keep torch's defaults. NONBLOCKING_TIMEOUT is the exception: torch reads it once
per process, so it is set for good. What the user has set is left as it is; where that cannot work it is said once.

Invariants: one `applied()` at a time, under a lock; all names are in NEEDED or in FOR_GOOD. Threads: any. Between
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
FOR_GOOD: dict[str, str] = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "30"}
"""Seconds that connecting may take, and a launch that waits for it; torch's default is 30 minutes."""
OLD_NAMES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT": "NCCL_BLOCKING_WAIT",
}
"""Which torch reads where the new name is not set."""
_FALSE = frozenset({"0", "false", "n", "no", "off", ""})

_lock = threading.Lock()
_said = False


def to_set(environment: Mapping[str, str]) -> dict[str, str]:
    """What has to be added to `environment`: what the user has not set, under either name. Pure."""
    users = {name for name in NEEDED if name in environment or OLD_NAMES.get(name, name) in environment}
    return {
        name: value for name, value in {**NEEDED, **FOR_GOOD}.items() if name not in environment and name not in users
    }


def warnings(environment: Mapping[str, str]) -> list[str]:
    """What the user has set that cannot work, one sentence each. Pure."""
    found = []
    for name in NEEDED:
        for spelled in (name, OLD_NAMES.get(name)):
            value = environment.get(spelled) if spelled is not None else None
            if value is not None and value.strip().lower() not in _FALSE:
                found.append(f"{spelled}={value} is left as it is, but {WHY[name]}: unset it")
                break
    for name in FOR_GOOD:
        value = environment.get(name)
        if value is not None and not (value.strip().isdigit() and int(value) > 0):
            found.append(f"{name}={value} is left as it is, but torch reads whole seconds there: unset it")
    return found


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Make the NCCL backend in here."""
    with _lock:
        _say_once()
        added = to_set(os.environ)
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                if name not in FOR_GOOD:
                    os.environ.pop(name, None)


def _say_once() -> None:
    global _said
    if _said:
        return
    _said = True
    for sentence in warnings(os.environ):
        logger.warning("%s", sentence)
    settings = " ".join(f"{name}={value}" for name, value in to_set(os.environ).items())
    if settings:
        logger.info("NCCL between the replicas is made with %s (docs/nccl.md)", settings)
