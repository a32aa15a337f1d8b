"""How long a collective may last: the limits of one rank, and what ends a collective that has waited too long.

How it works. `expect` arms the one timer when a collective, or the building of a process group, begins. When it fires
the machine is asked whether somebody has announced a pause, which puts it off; else the collective is ended, and so is
this rank's part in the quorum. While one waits for long, the network is looked at: for a peer that cannot be reached
nobody waits until the limit.

Threads: the training thread and the quorum worker call `expect`, `limit` and `disarm`, the timer's thread the rest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ft_core.errors import CollectiveError
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import Phase
from ft_core.runtime.collective_timeout import Watchdog
from ft_core.runtime.peer_links import PROBE_S

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from ft_core.protocol.rank.rank import Rank
    from ft_core.runtime.communicators import Communicators
    from ft_core.runtime.peer_links import Links
    from ft_core.runtime.user_works import UserWorks


class CollectiveLimits:
    """Those of one rank; `dispatch` hands its machine an event."""

    def __init__(
        self, rank: Rank, lock: threading.RLock, communicators: Communicators, works: UserWorks, links: Links,
        dispatch: Callable[[on.Event], None], timeout_s: float,
    ) -> None:  # fmt: skip
        self.patience_s = timeout_s
        """How long a collective may wait for a silent peer: `timeout`, less when the interpreter exits."""
        self._rank, self._lock, self._communicators, self._works, self._links = rank, lock, communicators, works, links
        self._dispatch = dispatch
        self._timer = Watchdog(rank.settings.replica_id, self._overdue, self._look_at_links)
        self._given_s: float | None = None
        """The timeout that should_commit was given, while it runs."""
        self._given_until = 0.0
        """When that is over (monotonic s)."""
        self._for_works = False
        """The timer was armed for the user's collectives only: once they have ended there is nothing to end."""

    def __repr__(self) -> str:
        return f"CollectiveLimits({self._timer!r})"

    def start(self) -> None:
        """Start the timer's thread."""
        self._timer.start()

    def stop(self) -> None:
        """End it."""
        self._timer.stop()

    def limit(self, given_s: float | None) -> None:
        """All that is waited for from now on has to come within `given_s`; None: each within `patience_s`."""
        self._given_s = given_s
        self._given_until = time.monotonic() + (given_s or 0.0)

    def expect(self, within_s: float | None = None, *, works_only: bool = False) -> None:
        """A collective, or a configure, begins, and has `within_s` from now on (else `patience_s`)."""
        self._for_works = works_only
        if within_s is None and self._given_s is not None:
            self._timer.arm(self._given_until)
        else:
            self._timer.arm(time.monotonic() + (self.patience_s if within_s is None else within_s))

    def disarm(self) -> None:
        """It has ended."""
        self._timer.disarm()

    def probe(self) -> tuple[str, ...]:
        """Look which peers can be reached; the next ask says so (the lighthouse leaves out who is cut off)."""
        silent = self._links.probe(min(PROBE_S, (self._given_s or self.patience_s) / 4))
        self._dispatch(on.LinksSeen(*self._links.statement))
        return silent

    def _overdue(self) -> float | None:
        """It has waited for too long. Returns when to look again, because somebody has announced a pause."""
        if self._for_works and self._works.all_ended():
            return None
        limit_s, quorum_id = self._given_s or self.patience_s, self._communicators.quorum_id
        with self._lock:
            later = self._rank.overdue(limit_s, time.monotonic())
        if later is not None:
            return later
        self.probe()
        limit = f"{limit_s:g} s (should_commit's timeout)" if self._given_s else f"timeout={limit_s:g} s"
        self._end(
            f"a peer did not take part in a collective within {limit} "
            "(if it legitimately takes long, wrap that part in manager.pause(reason, max_s))",
            quorum_id,
        )
        return None

    def _look_at_links(self) -> None:
        """It waits for long. For a peer that cannot be reached, no longer."""
        if self._rank.phase not in (Phase.FORMING, Phase.OPEN, Phase.REDUCING):
            return  # nothing that could be given up any more
        if self._for_works and self._works.all_ended():
            return
        quorum_id = self._communicators.quorum_id
        unreachable = self.probe()
        if unreachable:
            self._end(f"{', '.join(unreachable)} cannot be reached over the network", quorum_id)

    def _end(self, reason: str, quorum_id: int) -> None:
        """End what waits in that quorum. A look at the network takes seconds, in which the next one may have formed."""
        failed = on.CollectiveFailed(CollectiveError(reason), quorum_id)
        self._dispatch(failed)  # first: who waits is told this, not of an abort
        self._communicators.abort(quorum_id)  # also if this rank is broken already: whatever waits must end
