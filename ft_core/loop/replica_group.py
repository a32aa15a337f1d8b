"""`ReplicaGroup`: the place of this process in its replica group, and of the group in the job.

Threads: none; values only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaGroup:
    """Where this process is in the job."""

    number: int = 0
    """Of this replica group, from 0."""
    total: int = 1
    """Replica groups of the complete job."""
    ranks: int = 1
    """Processes of this replica group."""
    rank: int = 0
    """Number of this process in its group."""
    name: str = ""
    """Of this replica group, as the lighthouse knows it; "" if it is not said."""
    lighthouse: str = ""
    """host:port of the lighthouse; "" if nobody said."""
