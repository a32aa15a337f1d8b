"""ftrun's exit status, from how its groups ended. Pure; threads: any."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("finished", "drained", "quarantined", "stopped", "missed", "failed")
"""How a group ends: all workers exited 0; drained; the restart policy gave up; ended by a signal while everything is
stopped, or killed by us; killed, or failed by itself, when training had ended, so it is not started again."""
BAD = frozenset({"quarantined", "stopped", "failed"})
ALL, MIN = "all", "min"
SUCCESS = (ALL, MIN)
"""What --success may be."""


def exit_status(ends: Sequence[str], success: str, min_replicas: int, *, whole_job: bool) -> int:
    """0: the job has succeeded; 1: it has not.

    Args:
        ends: one of KINDS per group.
        success: "all": every group that was not drained finished; one that was killed when training had ended does not
            spoil what the others finished. "min": min_replicas groups did, whatever became of the rest.
        min_replicas: the smallest quorum.
        whole_job: all groups of the job are in `ends`, so one of them has to have finished.
    """
    if success == ALL and BAD & set(ends):
        return 1
    if "drained" in ends and not {"quarantined", "stopped"} & set(ends):
        return 0
    good = sum(end in ("finished", "missed", "failed") for end in ends)
    need = min(min_replicas, len(ends)) if whole_job and success == MIN else 1
    return 0 if good >= need and ("finished" in ends or not whole_job) else 1
