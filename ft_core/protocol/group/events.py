"""What can happen to a replica group (events), and what its shell must do about it (effects). Values; see `group`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.protocol.pushes import Push
    from ft_core.protocol.types import Ask, Quorum, Verdict

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The leader listens at `port`: the other ranks are expected from now on."""

    port: int


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The lighthouse has opened the group's lease."""


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank has opened its stream, or opened it again; see `Group.refusal`."""

    rank: int
    incarnation: int
    """Of its process, not 0."""


@dataclass(frozen=True, slots=True)
class RankGone:
    """A rank's stream ended without a goodbye."""

    rank: int
    silence_s: float
    """How long nothing had been received on it."""


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A rank says goodbye."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankAsked:
    """A rank's part of the group's ask; `room` None leaves the room as it is."""

    rank: int
    ask: Ask
    room: str | None = None


@dataclass(frozen=True, slots=True)
class RankVoted:
    """A rank's vote on an attempt."""

    rank: int
    vote: Verdict


@dataclass(frozen=True, slots=True)
class RankBroke:
    """A rank cannot go on in `quorum_id`."""

    rank: int
    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankProgress:
    """What a rank is doing. `paused_s` > 0: it announced to be busy for at most that long from now on."""

    rank: int
    phase: str
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    """A rank, or an operator, wants the group to finish its step and leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The lighthouse's answer to the group's ask `seq`."""

    seq: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Pushed:
    """Anything else that the lighthouse sends, meant for every rank."""

    push: Push


@dataclass(frozen=True, slots=True)
class RefusedByLighthouse:
    """The lighthouse will not have this group, for good."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Started | Welcomed | RankJoined | RankGone | RankLeft | RankAsked | RankVoted | RankBroke | RankProgress
    | DrainOrdered | Answered | Pushed | RefusedByLighthouse | Tick
)  # fmt: skip


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class AskLighthouse:
    """Ask for the next quorum; `room` None: in the room the lease is in."""

    ask: Ask
    room: str | None


@dataclass(frozen=True, slots=True)
class ReportIncomplete:
    """Tell the lighthouse that the group has left `quorum_id`, and cannot ask before all its ranks are back."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Tell the lighthouse that the group is busy for at most `paused_s` more; 0: it is back."""

    phase: str
    """What the rank does that announced it; '' if it is back."""
    paused_s: float


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell each (rank, seq) in `to` the same quorum, as the answer to its ask."""

    quorum: Quorum
    to: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Decide:
    """Tell these ranks the group's verdict on an attempt."""

    to: tuple[int, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell one rank."""

    rank: int
    push: Push


@dataclass(frozen=True, slots=True)
class TellAll:
    """Tell every rank."""

    push: Push


@dataclass(frozen=True, slots=True)
class Refuse:
    """The group is refused for good: tell every rank."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    text: str


Effect = AskLighthouse | ReportIncomplete | RenewLease | Announce | Decide | Tell | TellAll | Refuse | Note
