"""The rule about closed connections: when they are a suspicion, and when their replicas are lost. Pure.

How it works. The lighthouse sees that a lease stream ended, not why: the process may have died, or a proxy, a balancer
or a one-way cut closed the connection of one that trains on. So a closed connection alone is never a death. It becomes

- a *suspicion* after the grace: the other members of its quorum are notified and break off their attempt: the death
  may be one that their collectives cannot show (forked workers hold its sockets). Whoever breaks off asks with
  `failed`, which is the accusation;
- a *loss* at once when a member of the same quorum accuses it, else after a liveness timeout plus the clients'
  reconnect time. Who is lost is not waited for any more, but what it reported as stable is remembered (R2).

Only a goodbye or a supervisor's report makes a death certain (`Life.GONE`).

Two situations make a closed connection prove less. If more than half of a quorum is closed, links are likelier to have
failed than processes: an accusation then counts after the grace. And a member that has just re-opened its lease shows
that connections ended, not processes: until `doubt_until` the others get the time to return, too.

Invariant: what `Absences` answers depends only on what it is given, so the room can name the next instant of interest.
Ownership: the table and the quorum of `room.Room`, which alone change records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.crash_backoff import CRASH_WINDOW_S
from ft_core.protocol.lighthouse.reasons import PLAIN_PHASES
from ft_core.protocol.lighthouse.view import ABSENT, Life
from ft_core.protocol.types import UNTRAINED, VOID

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.rules import Rules
    from ft_core.settings import LighthouseSettings


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances in which the lease of one replica is looked at."""

    harmless: bool
    """It is and was in no quorum, here or elsewhere: nothing can go on beside it, or be made again, should it live."""
    most_closed: bool
    """More than half of the room's quorum has no lease."""
    boot_until: float
    rules: Rules


class Absences:
    """The clock of replicas without a lease: when they are suspected, lost, or forgotten. Instants in seconds."""

    def __init__(self, settings: LighthouseSettings, boot_at: float) -> None:
        self._settings = settings
        self.turbulent_until = boot_at
        """Until then no closed connection counts: most leases dropped together (R15)."""
        self._returning_until = boot_at
        """Until then neither: a member has just re-opened its lease, and others may follow."""

    def __repr__(self) -> str:
        return f"Absences(in doubt until {self.doubt_until:.1f})"

    @property
    def doubt_until(self) -> float:
        """Until then a closed connection proves nothing."""
        return max(self.turbulent_until, self._returning_until)

    def longest_s(self, record: Record) -> float:
        """A liveness timeout plus the clients' reconnect time: who lives and can reach the lighthouse is back in it."""
        return record.hello.liveness_s + self._settings.boot_window_s

    def returned(self, record: Record, now: float) -> None:
        """A member has re-opened its lease.

        A new window of doubt opens only a whole absence after the last one, so that one member whose connection breaks
        again and again does not hide the deaths of the others.
        """
        if now >= self._returning_until + self.longest_s(record):
            self._returning_until = now + self._settings.boot_window_s

    def suspected(self, record: Record, now: float) -> bool:
        """Whether the other members of its quorum are notified that it is lost, or may be."""
        if record.life is Life.GONE:
            return True
        if now < self.doubt_until:
            return False
        closed = record.life is Life.CLOSED and now >= record.since + self._settings.grace_s
        return closed or record.life in (Life.LOST, Life.MISSED)

    def look(self, record: Record, now: float, around: Circumstances) -> tuple[Life, tuple[float, ...]]:
        """Judge the life of a replica: returns what to believe of it now, and when to look again."""
        match record.life:
            case Life.UNKNOWN:
                # A member of a presented quorum is expected until liveness or a peer's report removes it (R9).
                silent_at = record.since + self.longest_s(record) if around.rules.r9_silent else math.inf
                at, then = max(around.boot_until, 0.0 if record.peer_reported_failure else silent_at), Life.MISSED
            case Life.CLOSED if around.harmless or not around.rules.r1_closed:
                grace_s = 0.0 if record.peer_reported_failure else self._settings.grace_s
                at, then = max(record.since + grace_s, self.turbulent_until), Life.GONE
            case Life.CLOSED:
                at, then = self._lost_at(record, most_closed=around.most_closed), Life.LOST
            case _:
                return record.life, (self.doubt_until,)
        if now >= at:
            return then, (self.doubt_until,)
        return record.life, (at, record.since + self._settings.grace_s, self.doubt_until)

    def _lost_at(self, record: Record, *, most_closed: bool) -> float:
        if not record.peer_reported_failure:
            return max(record.since + self.longest_s(record), self.doubt_until)
        return max(record.since + (self._settings.grace_s if most_closed else 0.0), self.doubt_until)


def became(replica_id: str, record: Record, was: Life) -> Iterator[str]:
    """Lines for the log about a replica of which the lighthouse believed something else before."""
    if was is Life.CLOSED:
        how = "is gone" if record.life is Life.GONE else "is lost: its connection closed"
        doing = f", {record.phase}" if record.phase not in PLAIN_PHASES else ""
        yield f"{replica_id} {how} (last seen at step {record.step}{doing})"
    elif was is Life.UNKNOWN:
        yield f"{replica_id} has not returned since the lighthouse started"


def presume_over(members: Sequence[Record]) -> bool:
    """Whether a quorum that has reported no commit holds up nobody: every connection closed, none returned.

    Without a supervisor a job that dies in its first step would otherwise wait orphan_s for its own dead. What is at
    stake if it lives is what it committed since: it had reported nothing. Marks those whose id may be taken.
    """
    over = all(r.life in (Life.LOST, Life.GONE) for r in members)
    for record in members:
        record.presumed_dead = over and record.life is Life.LOST and record.stable <= UNTRAINED
    return over


def forgotten(record: Record, now: float) -> bool:
    """Whether the record of a replica that no quorum names can be dropped: nothing waits for it any more.

    Should it return, its hello makes a new one.
    """
    if record.life is Life.GONE:
        return now - record.since > CRASH_WINDOW_S
    waited_for = record.life in (
        *ABSENT,
        Life.UNKNOWN,
    )  # until orphan_s: its quorum may live (R1), and it may hold newer state (R2)
    return waited_for and now - record.since > max(CRASH_WINDOW_S, record.hello.orphan_s)


def least_needed(records: Mapping[str, Record], members: Collection[str]) -> str:
    """Pick the replica to forget for a newcomer: the longest-gone one that no quorum names; '': nobody.

    Else the longest-absent one whose stable state a living one has reported as well: nothing would wait for it.
    """
    others = [(r.since, i, r) for i, r in records.items() if i not in members]
    newest = max((r.stable for r in records.values() if r.life is Life.UP), default=VOID)
    gone = [(since, i) for since, i, r in others if r.life is Life.GONE]
    gone = gone or [(since, i) for since, i, r in others if r.life in ABSENT and r.stable <= newest]
    return min(gone)[1] if gone else ""
