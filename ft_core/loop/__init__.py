"""The kit for whoever owns a training loop: `TrainingLoop` for a loop of one's own, its parts for frameworks.

An adapter of a framework says when to open, vote, pause and end; what state is; and what the framework's private parts
look like. Everything else is here, one noun per file: docs/own-loop.md.
"""

from ft_core.loop.job_checkpoint import latest
from ft_core.loop.own_loop import Stateful, TrainingLoop
from ft_core.loop.replica_group import ReplicaGroup

__all__ = ["ReplicaGroup", "Stateful", "TrainingLoop", "latest"]
