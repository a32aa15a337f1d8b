"""What torch reads from the environment when it makes an NCCL backend, and what ours needs there.

torch's defaults end the process, or a collective, when it thinks that something takes too long. Ours are aborted by us,
with a flag that is set before, so that no step is committed whose sum was cut short; nobody else may do it.

How it works. `applied()` sets the variables around the making of one backend, which reads them, and puts back what was
there: the script's own NCCL groups keep torch's defaults. They are set whatever is there: launchers set
TORCH_NCCL_ASYNC_ERROR_HANDLING=1 for every worker (torchrun's agent, ftrun's), and no other value can work here.
torch's debug level is OFF meanwhile: with DETAIL, torch puts its own value in the place of two of them.

One variable is set for the script's groups, too (OF_ALL_GROUPS), when this is imported, unless the user has set it.
When torch has seen a collective of ours fail, it sets a flag that is the whole process's. The first NCCL group of the
process looks at that flag once a second, takes it for a failure of its own, and ends the process after eight minutes.
It looks only if that variable was not 0 when the group was made.

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

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

logger = logging.getLogger(__name__)

NEEDED: dict[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
WHY: dict[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch ends this process when a peer dies, instead of leaving it to the group",
    "TORCH_NCCL_BLOCKING_WAIT": "torch aborts a collective in a wait, and a sum that was cut short may be committed",
    "TORCH_NCCL_ENABLE_MONITORING": "torch ends this process when an abort takes longer than its watchdog's patience",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "torch asks the quorum's store for signals after the quorum has ended",
    "TORCH_NCCL_PROPAGATE_ERROR": "torch asks the quorum's store for signals after the quorum has ended",
    "TORCH_NCCL_DESYNC_DEBUG": "torch takes TORCH_NCCL_ASYNC_ERROR_HANDLING=0 for 3, and ends this process",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "torch's watchdog sleeps for four times as long, a minute, where a "
    "collective has failed, and who drops the group waits for it",
}
"""What happens with another value than the one in NEEDED."""
OF_ALL_GROUPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
"""0 for the script's groups, too: the file's header says why. What they lose is the dump of torch's flight recorder."""

_lock = threading.Lock()
_said = False


def set_for_all_groups(environment: MutableMapping[str, str]) -> str:
    """Set OF_ALL_GROUPS, unless it is there. Returns what to tell the user if a group was made without it, or ''."""
    late = too_late(environment)
    environment.setdefault(OF_ALL_GROUPS, "0")
    return late


def too_late(environment: Mapping[str, str]) -> str:
    """What to tell the user if a group of the script's may take a failure of ours for its own; '' if none does."""
    if environment.get(OF_ALL_GROUPS) == "0" or not dist.is_initialized() or "nccl" not in dist.get_backend_config():
        return ""
    return (
        "torch.distributed.init_process_group has made a group that may end this process eight minutes after another "
        f"replica has died: set {OF_ALL_GROUPS}=0, or leave it unset and write `from ft_core import ...` before it "
        "(docs/nccl.md)"
    )


_too_late = set_for_all_groups(os.environ)


def to_set(environment: Mapping[str, str]) -> dict[str, str]:
    """What has to be changed in `environment`. torch reads a new name before its old one. Pure."""
    return {name: value for name, value in NEEDED.items() if environment.get(name) != value}


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Make the NCCL backend in here."""
    with _lock:
        _say_once()
        added = to_set(os.environ)
        before, level = {name: os.environ.get(name) for name in added}, get_debug_level()
        os.environ.update(added)
        set_debug_level(DebugLevel.OFF)
        try:
            yield
        finally:
            set_debug_level(level)
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
    late = _too_late or too_late(os.environ)
    if late:
        logger.warning("%s", late)
    settings = " ".join(f"{name}={value}" for name, value in to_set(os.environ).items())
    if settings:
        logger.info("NCCL between the replicas is made with %s (docs/nccl.md)", settings)
