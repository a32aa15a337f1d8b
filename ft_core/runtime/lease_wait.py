"""What the members of a quorum do when none of them has had a lease for autonomy_s (R3): wait for one, together.

How it works. That it is so comes out of a fence, so all members know it of the same attempt. At the next boundary each
of them waits instead of computing gradients that nobody would commit. Every POLL_S they sum up how many have a lease
again, over the control group; when it is one, all go on at once, those without a lease, too. There is no time limit: a
lighthouse may be away for hours, and then the same quorum goes on. What ends it: a lease, a broken quorum, an order to
drain, a refusal, a shutdown.

Invariant: all members make the same number of these reductions, because each follows from the sum before. They are as
large as a fence, so that a member that launches one instead shows as broken. Threads: the training thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from ft_core.errors import CollectiveError, LighthouseError
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.ballot import FENCE_SLOTS

if TYPE_CHECKING:
    from ft_core.runtime.shell import RankShell

POLL_S = 0.25
"""How often members look whether one of them has a lease again."""
MARK = 0x1EA5
"""In the second slot, where a fence has a flag; below 2^14, so that its sum over a whole quorum is exact."""
log = logging.getLogger("ft_core")


def wait_for_a_lease(shell: RankShell) -> None:
    """Block until a member of the quorum has a lease, or this rank has something else to do.

    Raises:
        RefusedError, JobFinishedError: the lighthouse is back, and will not have this replica.
        LighthouseError: the Manager was shut down.
    """
    rank, since = shell.rank, time.monotonic()
    attempt, name, autonomy_s = rank.attempt, rank.settings.replica_id, rank.settings.autonomy_s
    why = f"no member has had a lease for autonomy_s={autonomy_s:g} s: training waits for the lighthouse"
    shell.dispatch(on.NoQuorumYet(why))
    log.warning("%s: %s (at step %d)", name, why, attempt.base.step)
    while attempt.awaits_lease and not rank.broken:
        with shell.changed:
            shell.changed.wait_for(lambda: rank.refused or rank.closed or rank.draining or rank.broken, POLL_S)
        if rank.refused is not None:
            raise rank.refused
        if rank.closed:
            raise LighthouseError("the manager was shut down while it waited for the lighthouse")
        if rank.draining:  # nobody to agree on it with: the others wait in a sum of theirs
            shell.fail(CollectiveError("this replica drains while no member has a lease"))
        elif not rank.broken:
            _poll(shell)
    if not rank.broken:
        log.info("%s: training goes on after %.1f s without a lighthouse", name, time.monotonic() - since)


def _poll(shell: RankShell) -> None:
    rank = shell.rank
    mine = torch.zeros(FENCE_SLOTS)
    with shell.lock:
        rank.acknowledged(shell.control.last_ack)
        mine[0], mine[1] = float(not rank.attempt.lacks_lease(time.monotonic())), float(MARK)
    shell.limits.expect()
    try:
        shell.communicators.sum(mine, shell.communicators.control()).wait()
    except Exception as error:  # noqa: BLE001 - as any collective: its failure breaks the quorum
        shell.fail(error)
        return
    finally:
        shell.limits.disarm()
    leased, marks = int(mine[0]), int(mine[1])
    if rank.plan is None or marks != MARK * rank.plan.size:
        shell.fail(CollectiveError("a member went on while the others wait for a lease"))
    elif leased:
        shell.dispatch(on.LeaseReturned())
