"""The end of training: all replicas stop after the same step, and none is left waiting.

How it works. EarlyStopping, Timer, `trainer.should_stop` and the limits on steps and epochs are decided by each replica
for itself; whoever has left its loop takes part in further votes (`ft_core.loop.stopping.stop_together`). A replica
that wanted to go on meets it in its next vote: its step is vetoed, its Trainer stops (`stop_as_agreed`), and it ends
with the same state. Where all decide alike, as in a run without faults, no step more or less is made than with plain
DDP.

Until that vote the leader may die while it saves: then another quorum has another leader, which redoes the writes.

Threads: the training thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ft_core.loop.tools import Sigterm
from ft_lightning._compat import writers

if TYPE_CHECKING:
    from ft_core import Manager

log = logging.getLogger("ft_lightning")


def stop_as_agreed(manager: Manager, trainer: Any) -> None:
    """Let the Trainer stop if the votes have shown that all stop. After each vote."""
    if manager.stop_agreed and not trainer.should_stop:
        log.info("%s: stops, as another replica has ended its training", manager.replica_id)
        trainer.should_stop = True


def drains_alone() -> None:
    """SIGTERM is the Manager's: leave after this step, at the next `start_quorum`, with status 0."""
    writers.own_sigterm(Sigterm)


def leave_on(manager: Manager, error: BaseException) -> None:
    """Leave because of an exception on this replica: the others notice at once, and go on without it."""
    if isinstance(error, SystemExit):
        manager.shutdown()  # between two steps: they need not lose one
    else:
        manager.shutdown(wait=False)
