"""The view that the quorum rule looks at, one room at one instant, and its answers. Values only. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.types import VOID, Ask, Version

if TYPE_CHECKING:
    from collections.abc import Mapping


class Life(Enum):
    """The life of a replica, as the lighthouse believes it to be."""

    UP = "up"
    CLOSED = "closed"
    """Its lease ended within a heartbeat of its last message: the connection was closed. It may be re-opened."""
    LOST = "lost"
    """Its connection closed, and it did not return or its quorum broke as well (`absence`): not waited for any more,
    but never *certainly* gone; a proxy may have closed the connection of a replica that trains on."""
    MISSED = "missed"
    """Its lease ended after silence: frozen or cut off, it may still be alive (never *certainly* gone)."""
    UNKNOWN = "unknown"
    """Named in a presented quorum, never seen under this boot (R9)."""
    GONE = "gone"
    """Certain: it left, a supervisor saw it end, or it was in no quorum and holds nothing that could be missed."""


ABSENT = (Life.LOST, Life.MISSED)
"""Out of reach, but perhaps alive: not waited for, and not forgotten before orphan_s."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One replica, as far as `decide` needs to know it."""

    replica_id: str
    life: Life
    since: float
    """When `life` began."""
    stable: Version = VOID
    """The newest version it reported as held by every member of its quorum (R2)."""
    ask: Ask | None = None
    asked_at: float = 0.0
    paused_until: float = 0.0
    phase: str = ""
    admitted_at: float = 0.0
    """Not a candidate before this instant (crash-loop debounce, or a living process of the `same_name`); 0: at once."""
    same_name: str = ""
    """The living replica of the same name because of which it waits."""
    incomplete: str = ""
    """The rank of it that is missing: it is not waited for, nor is its ask taken, before all of them are back (R12)."""
    back_at: float = 0.0
    """When its last pause ended: as in any wait for it, the time that it has to arrive counts from then."""
    min_replicas: int = 1
    """The number that its lease was opened with; its ask may know better (`minimum`)."""
    held_back: str = ""
    """Why it may not join before `admitted_at`, where that is more than that it crashed (`build_backoff`)."""

    @property
    def up(self) -> bool:
        """It has a lease."""
        return self.life is Life.UP

    @property
    def minimum(self) -> int:
        """The smallest quorum it agrees to be in."""
        return self.min_replicas if self.ask is None else self.ask.min_replicas


@dataclass(frozen=True, slots=True)
class Current:
    """The quorum that is in force, as far as this lighthouse knows."""

    quorum_id: int
    members: tuple[str, ...]
    ended: bool
    """A member asked after it, left, or is certainly gone; or all of it closed before a commit was reported."""
    ended_at: float = 0.0
    among: frozenset[str] = field(init=False, repr=False, compare=False)
    """The same members, to be looked up in."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "among", frozenset(self.members))


@dataclass(frozen=True, slots=True)
class View:
    """One room at one instant."""

    now: float
    seen: Mapping[str, Seen]
    current: Current | None
    min_replicas: int = 1
    expected: int = 0
    """How many groups the job is configured with (FT_NUM_REPLICA_GROUPS), less those given up; 0: unknown."""
    join_timeout_s: float = 0.1
    join_s: float = 10.0
    orphan_s: float = 900.0
    boot_until: float = 0.0
    restart_until: float = 0.0
    """boot + orphan_s: until then a lighthouse that knows no quorum may be one that forgot it (R9)."""
    rules: Rules = field(default_factory=Rules)
    trained: bool = False
    """Somebody has shown trained state since the lighthouse started."""
    met_at: float = -inf
    """When contact with the other lighthouse of a pair was made: until then a replica may have had a lease there."""
    holders: tuple[str, ...] = ()
    """Members of the last quorums that either lighthouse of a pair knows: they may hold what was trained (R22)."""
    cut: frozenset[tuple[str, str]] = frozenset()
    """Pairs of replicas that cannot reach each other (`reachability`)."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A quorum may form now, of these asks (sorted by replica_id). `left_out` maps living members to why."""

    asks: tuple[Ask, ...]
    left_out: Mapping[str, str]
    quorum_id: int = 0
    """Under which the other lighthouse has recorded it (R22); 0: a new one."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """No quorum yet: `reason` is a sentence for users; `at` is when to look again if nothing happens before."""

    reason: str
    at: float | None
    waiting_for: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    """Those who ask and would not be in it either, each with the sentence why (`candidates.choose`)."""
    paused_until: float = 0.0
    """Until when somebody who has not asked may be busy, as it announced (0: nobody): counts against nobody's limit."""
    void: tuple[Ask, ...] = ()
    """Those who ask, if none of them holds a usable state."""
    propose: bool = False
    """The other lighthouse has to record it first, and has not been asked (R22)."""
