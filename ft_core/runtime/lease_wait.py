"""What the members of a quorum do when none of them has had a lease for autonomy_s (R3): wait for one, together.

How it works. That it is so comes out of a fence, so all members know it of the same attempt. At the next boundary each
of them waits instead of computing gradients that nobody would commit. Every POLL_S they sum up how many have a lease
again, on the second lane; when it is one, all go on at once, those without a lease, too. There is no time limit: a
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
from ft_core.protocol.rank.ballot import FENCE_SLOTS

if TYPE_CHECKING:
    from ft_core.runtime.session import Session

POLL_S = 0.25
"""How often members look whether one of them has a lease again."""
MARK = 0x5EA5
"""In the second slot: what a fence has there in such a sum is a digit of its weight, and a tag that fits none."""
log = logging.getLogger("ft_core")


def wait_for_a_lease(session: Session) -> None:
    """Block until a member of the quorum has a lease, or this rank has something else to do.

    Raises:
        RefusedError, JobFinishedError: the lighthouse is back, and will not have this replica.
        LighthouseError: the Manager was shut down.
    """
    step, since = session.step, time.monotonic()
    name, autonomy_s = step.settings.replica_id, step.settings.autonomy_s
    session.reason = f"no member has had a lease for autonomy_s={autonomy_s:g} s: training waits for the lighthouse"
    log.warning("%s: %s (at step %d)", name, session.reason, step.base.step)
    while step.awaits_lease and not step.broken:
        with session.changed:
            session.changed.wait_for(lambda: session.fatal or session.closed or session.draining or step.broken, POLL_S)
        if session.fatal is not None:
            raise session.fatal
        if session.closed:
            raise LighthouseError("the manager was shut down while it waited for the lighthouse")
        if session.draining:  # nobody to agree on it with: the others wait in a sum of theirs
            session.fail(CollectiveError("this replica drains while no member has a lease"))
        elif not step.broken:
            _poll(session)
    if not step.broken:
        log.info("%s: training goes on after %.1f s without a lighthouse", name, time.monotonic() - since)


def _poll(session: Session) -> None:
    step = session.step
    mine = torch.zeros(FENCE_SLOTS)
    with session.lock:
        step.acknowledged(session.control.last_ack)
        mine[0], mine[1] = float(not step.lacks_lease(time.monotonic())), float(MARK)
    session.expect()
    try:
        session.lanes.sum(mine, session.lanes.second()).wait()
    except Exception as error:  # noqa: BLE001 - as any collective: its failure breaks the quorum
        session.fail(error)
        return
    finally:
        session.watchdog.disarm()
    leased, marks = int(mine[0]), int(mine[1])
    if step.plan is None or marks != MARK * step.plan.size:
        session.fail(CollectiveError("a member went on while the others wait for a lease"))
    elif leased:
        with session.lock:
            step.lease_returned()
