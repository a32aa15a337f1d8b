"""What the dashboard is told: all rooms of a lighthouse at one instant, and what happened since. Values only. Pure.

Whoever takes a sample does so on the lighthouse's loop, in one go, and copies only what may change afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ft_core.protocol.types import Quorum, Version


class ReplicaSample(NamedTuple):
    """One replica, as the lighthouse believes it to be. Instants are the lighthouse's seconds. Cheap to make."""

    replica_id: str
    name: str
    life: str
    """A value of `protocol.lighthouse.view.Life`."""
    since: float
    """When `life` began."""
    step: int
    phase: str
    """What it last reported to be doing."""
    asking: bool
    asked_at: float
    paused_until: float
    stable: Version
    """The newest state that it reported as held by its whole quorum."""
    stalled: str
    """Not empty: alive, but it did not come to the next quorum in time; a sentence."""
    incomplete: str
    """Not empty: which of its ranks is missing; a sentence."""
    silence_s: float
    """Since the last message on its lease; less than 0: it has no lease."""
    release: str
    ranks: int
    heal_addresses: tuple[str, ...]
    healed: tuple[int, int] = (0, 0)
    """Bytes of state that it has, and of all that it receives now; (0, 0): it reported none."""


@dataclass(frozen=True, slots=True)
class RoomSample:
    """One room."""

    name: str
    quorum_id: int
    """Of the quorum in force; 0: there is none."""
    members: tuple[str, ...]
    ended: bool
    """The quorum in force can complete nothing more: the next one is being formed."""
    formed: Quorum | None
    """The last quorum that was formed here, with what its members asked with."""
    reason: str
    """Why there is no quorum for those who ask."""
    held: Mapping[str, str]
    """Those who ask and are held back, each with a reason of its own."""
    closed: str
    given_up: Mapping[str, str]
    replicas: Sequence[ReplicaSample]


class PairSample(NamedTuple):
    """Of a pair of lighthouses, what this one does. Instants are the lighthouse's seconds."""

    role: str
    """A value of `protocol.lighthouse.pair.Role`."""
    other: str
    """Where the other one is, host:port."""
    since: float
    """When it took this role."""
    contact: bool
    """Each of the two hears the other."""
    contact_since: float
    """When that became so."""
    complete: bool
    """Since its own start it has been told all that the other one knew."""
    took_over: bool = False
    """It serves since the other one, which served before, could not be reached any more."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened: an event of `events.schema`, written by the lighthouse."""

    at: float
    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """All rooms at the instant `at`, and the notes since the last sample, oldest first."""

    at: float
    """Wall-clock seconds that never jump."""
    started: float
    """When the lighthouse was started."""
    liveness_s: float
    release: str
    rooms: Sequence[RoomSample]
    notes: Sequence[Note] = field(default=())
    pair: PairSample | None = None
    """None: this lighthouse is alone."""
