"""What the shell of a rank has to do, in the order in which the machine returned it. Values only. Pure.

`Prefetch`, `Offer`, `Configure` and `Receive` may block: a shell with a thread for that does them there, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.types import Ask


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Copy live state from running members; then report PrefetchEnded."""

    within_s: float
    """So long the first of them may take to give any. Copying itself has a limit of its own."""


@dataclass(frozen=True, slots=True)
class SendAsk:
    """Send it to the lighthouse, by way of the group."""

    ask: Ask
    room: str


@dataclass(frozen=True, slots=True)
class Entered:
    """A quorum was entered: tell the user who was lost, and who is back."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Offer:
    """Serve the state of the boundary that was asked at to the members that heal; what was offered before ends."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class OfferLive:
    """Serve that state to newcomers that copy it before they ask."""


@dataclass(frozen=True, slots=True)
class Configure:
    """Build the process groups of a quorum; then report GroupsUp or GroupsFailed."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the planned state; then report StateReceived or ReceiveFailed."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """End what is being received."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the collectives of this quorum, here and at the peers, and what is being received in it."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class AbortUserGroup:
    """End the script's own collectives of this quorum; the ballot's may still be on its way to a peer."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class TellGroup:
    """This rank is broken: report it to the other ranks of the group."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class TellParted:
    """Nothing is under way here that these members, which have left, keep their connections open for (R16)."""

    quorum_id: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookAtLinks:
    """Look to whom of the last quorum a connection can be opened; then report LinksSeen."""


@dataclass(frozen=True, slots=True)
class Report:
    """A line for the log; `warns`: the user should see it."""

    text: str
    warns: bool = False


Action = (
    Prefetch | SendAsk | Entered | Offer | OfferLive | Configure | Receive | CancelReceive | Abort | AbortUserGroup
    | TellGroup | TellParted | LookAtLinks | Report
)  # fmt: skip
Actions = tuple[Action, ...]
