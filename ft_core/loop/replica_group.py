"""`ReplicaGroup`: the place of this process in its replica group, and of the group in the job.

Threads: none; values only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.settings import Environment

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    """host:port of the lighthouse, or of two with a comma between; "" if nobody said."""

    @staticmethod
    def of(environ: Mapping[str, str] = os.environ) -> ReplicaGroup:
        """The place of this process, as ftrun or torchrun says it.

        Raises:
            ConfigError: a variable cannot work; names it.
        """
        found = Environment.read(environ)
        number = found.replica_group or 0
        return ReplicaGroup(
            number,
            max(found.num_replica_groups or 1, number + 1),
            int(environ.get("WORLD_SIZE") or 1),
            int(environ.get("RANK") or 0),
            found.replica_id or f"replica-{number}",
            found.lighthouse or "",
        )
