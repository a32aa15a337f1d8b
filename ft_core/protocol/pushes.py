"""What the lighthouse sends to trainers and a leader to its ranks: one small dataclass per kind of push. Values only.

They are not the effects of a room or a group, which name their receivers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.protocol.types import VOID, Quorum, Verdict, Version

Peers = tuple[tuple[str, tuple[str, ...]], ...]
"""(replica_id, heal addresses) of each current member."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The stream is open. `boot` tells a reconnect from a restart of the lighthouse."""

    liveness_s: float
    peers: Peers = ()
    """Members of the current quorum, for prefetching; from the lighthouse only."""
    boot: int = 0
    of_pair: bool = False
    """The lighthouse decides together with another one; from the lighthouse only."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The quorum that answers the ask `seq`."""

    seq: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Reason:
    """Why there is no quorum yet; `paused_s`: what it waits for is busy for at most that much longer."""

    text: str
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change of membership is wanted in `quorum_id`."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Members of `quorum_id` that will not answer any more."""

    quorum_id: int
    lost: tuple[str, ...]
    held: Version = VOID
    """The oldest state that one of them held when it said goodbye; VOID unless all of them did."""
    failed: bool = False
    """One of them has left because its data plane broke: that speaks against whoever has no connection."""
    moves: bool = False
    """Of a leader to its ranks: the attempt goes on in the next quorum if no rank has launched any of it (R19)."""


@dataclass(frozen=True, slots=True)
class Busy:
    """A peer is legitimately busy for at most `for_s`."""

    quorum_id: int
    replica_id: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Over:
    """`quorum_id` is over."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Final. `error` is what the receiver raises."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Order:
    """An operator's order: exit now (`kill`) or finish the step and leave."""

    kill: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Acked:
    """What the receiver sent at its `clock_s` has arrived; the sender's own lease is `lease_age_s` old."""

    clock_s: float
    lease_age_s: float = 0.0
    renew_s: float = 0.0
    """How often to renew the stream from now on; 0: four times per liveness timeout."""


Push = Welcome | Answer | Reason | Change | Lost | Busy | Over | Refusal | Order | Acked | Verdict
