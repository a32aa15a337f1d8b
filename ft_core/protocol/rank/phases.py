"""Where a rank is in its quorum and its heal, and what it does at a step boundary: the words of `rank`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where a rank is in its current quorum; OUTSIDE: in none yet."""

    OUTSIDE = "outside"
    ENTERED = "entered"
    """The quorum is known, the process group is being configured."""
    OPEN = "open"
    """Nothing of the attempt has been launched."""
    LAUNCHED = "launched"
    FENCED = "fenced"
    """The verdict of the attempt is latched and waits to be settled."""
    BROKEN = "broken"


class Heal(Enum):
    """What became of the state this rank is to receive in this quorum."""

    NONE = "none"
    PENDING = "pending"
    READY = "ready"
    """Received and verified, not applied yet."""
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Go:
    """Stay in the current quorum: no message is sent."""


@dataclass(frozen=True, slots=True)
class MustAsk:
    """Ask for a new quorum; `failed`: the data plane of the old one is broken."""

    reason: str
    failed: bool
