"""What a fence decided: a value that the ranks of a group merge (`group`) and send each other (`wire`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What a fence decided."""

    COMMIT = "commit"
    VETO = "veto"
    """Everybody skips the step; nothing is rebuilt."""
    BROKEN = "broken"
    """This member cannot follow the verdict; it leaves the quorum and asks for another."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What this rank learnt from the fence of one attempt."""

    quorum_id: int
    attempt: int
    outcome: Outcome
    reason: str = ""
    weight: int = 0
    """Sum of the weights of all gradients in the sum: the divisor (R10)."""
    contributors: int = 0
    missing: tuple[int, ...] = ()
    """Whose share of the step is not in the sum: places among the participants; nearly always empty (R17)."""
    change: bool = False
    """Everybody asks for a new quorum at the next boundary."""
    healed: bool = False
    """All planned heals were ready: roles switch at the next attempt (R10)."""
    exhausted: bool = False
    """The round of data is over: every member is out of it (R16), or one of them ends it for all."""
    stop: bool = False
    """Some member asked everybody to stop at this step."""
    behind: bool = False
    """A rank of this group lacks the state that a commit builds on: no rank of the group applies it (R12)."""
    drain: bool = False
    """A rank of this group is to drain: all of them leave at the next boundary."""
    lapsed: bool = False
    """No member of a ring has had a lease for autonomy_s: all wait at the next boundary until one has (R3)."""
    trails: bool = False
    """A rank of this group is out of data and nobody applies commits there: no rank of the group applies this one."""
