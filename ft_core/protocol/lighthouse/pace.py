"""How often leases are renewed, and how often is decided: less often each, the more there are. Pure.

What a renewal costs the lighthouse is the same whatever it says, and at four per liveness timeout a thousand groups
keep half a core busy. A renewal has two uses: its absence tells a frozen process from a closed connection (`absence`),
for which two per liveness timeout would be enough, and it brings what is stable, which nobody waits for. Its
acknowledgement costs as much again, and says that the lease stands (R3): once per liveness timeout is often for what is
counted in minutes. A connection that is silent for longer is pinged, which costs half as much as a renewal
(`rpc/channel.py`): so leases are renewed more often than that, however many there are.

A decision looks at every replica of a room, so a large room rests after each and decides about all that came meanwhile.
"""

from __future__ import annotations

AS_USUAL = 256
"""Up to so many leases renew four times per liveness timeout."""
LONGEST = 0.45
"""However many there are, each renews after so much of the liveness timeout: one that is late must not look like a
freeze, and none is to be pinged meanwhile."""
ACKNOWLEDGED = 2
"""Where leases are many, one of so many renewals is acknowledged."""
ALONE = 64
"""In a room of at most so many replicas, what happens is decided about at once."""
SETTLE_S_PER_REPLICA = 2e-5
"""About twice what a decision costs for each replica of the room: 20 ms between two decisions about a thousand."""


def renewal_s(leases: int, liveness_s: float) -> float:
    """How long to wait between two renewals; 0: as usual."""
    if leases <= AS_USUAL:
        return 0.0
    return liveness_s * min(leases / AS_USUAL / 4, LONGEST)


def is_acknowledged(leases: int, number: int) -> bool:
    """Whether the renewal of this number (from 0, of one stream) is acknowledged: each, or every second one."""
    return number % ACKNOWLEDGED == 0 or leases < ACKNOWLEDGED * AS_USUAL


def rest_s(replicas: int) -> float:
    """How long a room of so many replicas waits after a decision before it makes the next one."""
    return SETTLE_S_PER_REPLICA * replicas if replicas > ALONE else 0.0
