"""Where a rank is in its quorum and its heal, and which cause leads from one phase to the next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Phase(Enum):
    """Where a rank is in its current quorum; OUTSIDE: in none yet."""

    OUTSIDE = "outside"
    ASKING = "asking"
    """It waits for the next quorum; what it was in before is over."""
    FORMING = "forming"
    """The quorum is known, the process groups are being configured."""
    OPEN = "open"
    """Nothing of the attempt has been launched."""
    REDUCING = "reducing"
    """A gradient collective of the attempt has been launched."""
    COUNTED = "counted"
    """The verdict of the attempt is latched and waits to be settled."""
    BROKEN = "broken"
    """It cannot follow its quorum any more, and launches nothing until it is in another one."""


class Heal(Enum):
    """What became of the state this rank is to receive in this quorum."""

    NONE = "none"
    PENDING = "pending"
    READY = "ready"
    """Received and verified, not applied yet."""
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Go:
    """Stay in the current quorum, or in the one that forms: no message is sent."""


@dataclass(frozen=True, slots=True)
class MustAsk:
    """Ask for a new quorum; `failed`: the data plane of the old one is broken."""

    reason: str
    failed: bool


class Cause(Enum):
    """Why a phase changes."""

    ASK = "a quorum is wanted"
    ANSWER = "the lighthouse has announced it"
    BUILT = "its process groups are up"
    LAUNCH = "a gradient collective is launched"
    COUNT = "the ballot of all members has come back"
    SETTLE = "the group's verdict was applied"
    BREAK = "this rank cannot follow its quorum"
    NONE_FORMED = "there is no quorum, and there was none before"


TRANSITIONS: Mapping[tuple[Phase, Cause], Phase] = MappingProxyType(
    {
        (Phase.OUTSIDE, Cause.ASK): Phase.ASKING,
        (Phase.OPEN, Cause.ASK): Phase.ASKING,
        (Phase.BROKEN, Cause.ASK): Phase.ASKING,
        (Phase.ASKING, Cause.ANSWER): Phase.FORMING,
        (Phase.ASKING, Cause.BREAK): Phase.BROKEN,
        (Phase.ASKING, Cause.NONE_FORMED): Phase.OUTSIDE,
        (Phase.FORMING, Cause.BUILT): Phase.OPEN,
        (Phase.FORMING, Cause.BREAK): Phase.BROKEN,
        (Phase.OPEN, Cause.LAUNCH): Phase.REDUCING,
        (Phase.OPEN, Cause.BREAK): Phase.BROKEN,
        (Phase.REDUCING, Cause.COUNT): Phase.COUNTED,
        (Phase.REDUCING, Cause.BREAK): Phase.BROKEN,
        (Phase.COUNTED, Cause.LAUNCH): Phase.REDUCING,
        (Phase.COUNTED, Cause.SETTLE): Phase.OPEN,
        (Phase.COUNTED, Cause.BREAK): Phase.BROKEN,
    }
)
"""Everything that can happen to a phase; what is not in it is a mistake of ours (a KeyError)."""

USABLE = frozenset({Phase.OPEN, Phase.REDUCING, Phase.COUNTED})
"""Collectives may be launched; after a verdict another backward pass starts another reduction."""
WAITING = frozenset({Phase.ASKING, Phase.FORMING})
"""There will be a quorum, or the reason why there is none."""
