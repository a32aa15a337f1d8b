"""What a closed connection amounts to: when it is a suspicion, and when its replica is no longer waited for. Pure.

How it works. The lighthouse sees that a lease stream ended, not why: the process may have died, or a proxy, a balancer
or a one-way cut closed the connection of one that trains on. So a closed connection alone is never a death. It becomes

- a *suspicion* after the grace: the other members of its quorum are told and break off their attempt, because the death
  may be one that their collectives cannot show (forked workers hold its sockets). Whoever breaks off asks with
  `failed`, which is the accusation;
- a *loss* at once when a member of the same quorum accuses it, else after a liveness timeout plus the clients'
  reconnect time. Who is lost is not waited for any more, but what it reported as stable is remembered (R2).

Only a goodbye or a supervisor's word makes a death certain (`Life.GONE`).

Two situations make a closed connection prove less. If more than half of a quorum is closed, links are likelier to have
failed than processes: an accusation then counts after the grace. And a member that has just re-opened its lease shows
that connections ended, not processes: until `doubt_until` the others get the time to return, too.

Invariant: `suspected_at` and `lost_at` only depend on what is given, so the room can name the next instant of interest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Absence:
    """One replica whose connection closed. Durations and instants in seconds."""

    since: float
    grace_s: float
    absence_s: float
    """A liveness timeout plus the clients' reconnect time: who lives and can reach the lighthouse is back by then."""
    accused: bool
    """A member of its quorum asked for a new one because its collectives failed."""
    most_closed: bool
    """More than half of its quorum has no lease."""
    doubt_until: float
    """Until then a closed connection proves nothing: others return, or most leases dropped together (R15)."""

    def suspected_at(self) -> float:
        """When the other members are told to break off."""
        return max(self.since + self.grace_s, self.doubt_until)

    def lost_at(self) -> float:
        """When nobody waits for it any more."""
        if not self.accused:
            return max(self.since + self.absence_s, self.doubt_until)
        return max(self.since + (self.grace_s if self.most_closed else 0.0), self.doubt_until)


def doubts(now: float, doubt_until: float, window_s: float, absence_s: float) -> float:
    """Until when closed connections prove nothing, after one of them was re-opened at `now`.

    A new window opens only an absence after the last one, so that one member whose connection breaks again and again
    does not hide the deaths of the others.
    """
    return now + window_s if now >= doubt_until + absence_s else doubt_until
