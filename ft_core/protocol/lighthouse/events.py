"""The events that can happen to a room, and the effects that its shell must perform. Values only; see `room`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.protocol.types import UNTRAINED, VOID, Ask, Basis, Quorum, Version

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.partner import Partner, Proposal, Told

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Hello:
    """A lease was opened (or re-opened) by a replica of our protocol version that knows the token."""

    replica_id: str
    name: str
    generation: int
    incarnation: int
    unary: bool = False
    """A client of the unary calls: it asks at every step, and what its steps mean is its own business."""
    version: Version = UNTRAINED
    stable: Version = VOID
    highest_id: int = 0
    quorum_id: int = 0
    members: tuple[str, ...] = ()
    """The quorum it presents: the one it is in, or left by an ask that is still open."""
    cast: bool = True
    """It has given a ballot in that quorum; `fenced`: a fence of it has completed."""
    fenced: bool = False
    after: tuple[Basis, ...] = ()
    """What that quorum grew out of (R22); none where a fence has completed in it."""
    signature: int = 0
    signature_lines: tuple[str, ...] = ()
    expected: int = 0
    min_replicas: int = 1
    group_world_size: int = 1
    join_s: float = 10.0
    liveness_s: float = 5.0
    orphan_s: float = 900.0
    heal_addresses: tuple[str, ...] = ()
    paused_s: float = 0.0
    """It announced to be busy, and may be for that much longer."""
    release: str = ""
    """Of the library it runs, for users."""

    @property
    def ids(self) -> dict[str, int]:
        """Every quorum id in it, by a name that its sender understands."""
        return {
            "quorum_id": self.quorum_id, "highest_id": self.highest_id, "version_quorum_id": self.version.quorum_id
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease stream ended without a goodbye. `silence_s`: since the last message received on it."""

    replica_id: str
    generation: int
    silence_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A report of what a replica is doing. `paused_s` > 0: it announced to be busy for at most that long."""

    replica_id: str
    generation: int
    step: int
    phase: str
    stable: Version
    paused_s: float = 0.0
    heal_addresses: tuple[str, ...] = ()
    healed: tuple[int, int] = (0, 0)
    """Bytes that it has of the state that it receives, and of all of it, for users; (0, 0): it receives none."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A replica group asks for the next quorum."""

    ask: Ask
    generation: int


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A rank of a group is frozen or gone: the group left `quorum_id`, and cannot ask before all its ranks are back."""

    replica_id: str
    generation: int
    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """An explicit goodbye. `finished`: training is over; the room stays closed for latecomers (R16)."""

    replica_id: str
    generation: int
    reason: str
    finished: bool
    version: Version
    agreed: bool
    """The others know: change-wanted rode in the last ballot, so nobody is stuck in a collective with the leaver."""
    over: bool = False
    """Its script has ended by itself, neither drained nor by an error: nobody misses its state (R21)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A supervisor's report: the process of this replica has ended; or, if a name is given, every process of that name
    whose lease does not stand."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A supervisor's report: every process of this name has ended, and it does not start another one."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Turbulence:
    """Most leases dropped together, or the lighthouse's own loop stalled: suspicions wait for the boot window (R15)."""


@dataclass(frozen=True, slots=True)
class Reopen:
    """Open a room that was closed by a finished replica."""


@dataclass(frozen=True, slots=True)
class PartnerIs:
    """What is known of the other lighthouse has changed (R22)."""

    partner: Partner


@dataclass(frozen=True, slots=True)
class PartnerTold:
    """The other lighthouse reports what it knows of this room."""

    told: Told


@dataclass(frozen=True, slots=True)
class Recorded:
    """The other lighthouse has recorded the quorum that was proposed to it, or, not `accepted`, refuses to."""

    quorum_id: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Hello
    | LeaseEnded
    | Progress
    | Asked
    | Incomplete
    | Left
    | Ended
    | GivenUp
    | Turbulence
    | Reopen
    | PartnerIs
    | PartnerTold
    | Recorded
    | Tick
)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Announce:
    """Send each (replica_id, seq) in `to` the same quorum."""

    quorum: Quorum
    to: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Explain:
    """Explain to `to` why there is no quorum yet; what it waits for is busy for at most `paused_s` more."""

    to: tuple[str, ...]
    reason: str
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChangePending:
    """Ask the members of `quorum_id` to agree on a new quorum at their next step boundary."""

    to: tuple[str, ...]
    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """Notify the members of `quorum_id` that `lost` will not answer any more: abort the data plane."""

    to: tuple[str, ...]
    quorum_id: int
    lost: tuple[str, ...]
    held: Version = VOID
    """The oldest state that one of them held when it said goodbye; VOID unless all of them did (R16)."""
    failed: bool = False
    """One of them has left because its data plane broke."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Notify the members of `quorum_id` that a peer is busy, so that nobody's watchdog fires before `for_s`."""

    to: tuple[str, ...]
    quorum_id: int
    replica_id: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Superseded:
    """Notify `to` that its quorum is over: abort and ask."""

    to: str
    quorum_id: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """End this replica's lease for good; `finished`: no error, the job is done; `lost`: what it trained is (R21)."""

    to: str
    reason: str
    finished: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask the other lighthouse to record a quorum before it is announced (R22)."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the lighthouse's log."""

    text: str


def formed_note(quorum: Quorum, before: tuple[str, ...]) -> str:
    """The log line about a new quorum; `before`: the members of the one that it follows."""
    newest = max(member.version for member in quorum.members)
    joined = sorted(set(quorum.ids) - set(before))
    gone = sorted(set(before) - set(quorum.ids))
    text = f"quorum of {len(quorum.members)} at {newest}: {', '.join(quorum.ids)}"
    text += f"; joined: {', '.join(joined)}" if joined and before else ""
    return text + (f"; without: {', '.join(gone)}" if gone else "")


Effect = Announce | Explain | ChangePending | MemberLost | Paused | Superseded | Refuse | Propose | Note
