"""What can happen to a rank, besides its own steps. Values only. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.protocol.types import VOID

if TYPE_CHECKING:
    from ft_core.protocol.rank.formation import Wish
    from ft_core.protocol.rank.phases import MustAsk
    from ft_core.protocol.types import Quorum, Verdict, Version


# ---------------------------------------------------------------- a quorum forms


@dataclass(frozen=True, slots=True)
class QuorumWanted:
    """The script is at a boundary and needs another quorum."""

    wish: Wish
    why: MustAsk | None = None
    """What is not the machine's reason to ask; None: the one that `Rank.boundary` gives."""


@dataclass(frozen=True, slots=True)
class PrefetchEnded:
    """Live state was copied, or nobody gave any; `error`: no donor can send what this rank could load."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class QuorumAnswered:
    """The lighthouse has answered ask `seq`."""

    seq: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class GroupsUp:
    """The process groups of a quorum stand."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class GroupsFailed:
    """They could not be built; `here`: because of this machine."""

    quorum_id: int
    reason: str
    here: bool


@dataclass(frozen=True, slots=True)
class NoQuorumYet:
    """Why there is none, and for how long at most somebody that is waited for has announced to be busy."""

    reason: str
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinksSeen:
    """To which members of the last quorum a connection could be opened, and to which not."""

    unreachable: tuple[str, ...]
    reached: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateWanted:
    """A newcomer waits for a view of this rank's live state, which it copies before it asks."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The lighthouse does not want this replica, for good."""

    error: Exception


# ---------------------------------------------------------------- within a quorum


@dataclass(frozen=True, slots=True)
class MemberLost:
    """Members of a quorum are gone; `held`: the state that all of them held when they said so, VOID if one did not.

    This rank's own replica_id among `lost`: another rank of its group left. `moves`: the attempt goes on in the next
    quorum if no rank of the group has launched any of it (R19).
    """

    quorum_id: int
    lost: tuple[str, ...]
    held: Version = VOID
    moves: bool = False


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """A peer has ended its connection to this rank, which may be waiting for it in a collective."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """The others have formed a newer quorum without this replica."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class ChangePending:
    """Somebody wants to join or leave."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class CollectiveFailed:
    """A collective, or what this rank was about to do, failed: it cannot follow the quorum."""

    error: Exception
    quorum_id: int = 0
    """Of the quorum that it was made in; 0: of the one that this rank is in."""


@dataclass(frozen=True, slots=True)
class SoftError:
    """A failure that leaves the collectives usable: zeros, and a veto for this attempt."""

    error: Exception


@dataclass(frozen=True, slots=True)
class StatesDiffer:
    """The members' states differ; `mine`: this rank is in the minority."""

    verdict: Verdict
    reason: str
    mine: bool


@dataclass(frozen=True, slots=True)
class DifferenceTolerated:
    """States differ again and again, and healing them does not help: they are not compared any more (R20)."""


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """A member of the quorum has a lease again (R3)."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A member is busy for at most `for_s`; 0: it is back. `replica_id` '': this rank itself."""

    quorum_id: int
    replica_id: str
    for_s: float


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class StateReceived:
    """The planned state was received and verified."""

    quorum_id: int


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """No donor could be received from in time; `final`: asking again would not help, this replica ends (R11)."""

    quorum_id: int
    error: Exception
    final: bool = False


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Something that this rank does for a quorum, or for what it receives in one, raised what nobody expected."""

    error: Exception


@dataclass(frozen=True, slots=True)
class StateApplied:
    """The received state has been loaded. The numbers, and when a pass over the data ended, are the donor's."""

    data_ended_at: Version | None
    batches_committed: int
    commit_weight: int


@dataclass(frozen=True, slots=True)
class StateTorn:
    """This rank's state is being overwritten, or was left half-written: it is nobody's donor (R7, R13)."""


@dataclass(frozen=True, slots=True)
class StateUntouched:
    """Nothing was written over the state after all: it is `version`, as before `StateTorn`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint was loaded."""

    version: Version
    lineage: int
    batches_committed: int


# ---------------------------------------------------------------- data, and the end


@dataclass(frozen=True, slots=True)
class DataEnded:
    """This rank has no data in this attempt. `applies`: it makes the others' commits; `ends`: the pass ends for all."""

    applies: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class DataBack:
    """The attempt without data is over."""


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    """This replica is to leave at the next boundary."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopWanted:
    """All members are to be asked to stop training."""


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """This rank leaves with its next ballot."""


@dataclass(frozen=True, slots=True)
class ShutDown:
    """This rank ends: nothing is waited for any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`Rank.next_at` has come; `reason`: what the way to the lighthouse says of why there is no quorum."""

    reason: str = ""


Event = (
    QuorumWanted | PrefetchEnded | QuorumAnswered | GroupsUp | GroupsFailed | NoQuorumYet | LinksSeen | StateWanted
    | Refused | MemberLost | PeerEnded | Superseded | ChangePending | CollectiveFailed | SoftError | StatesDiffer
    | DifferenceTolerated | LeaseReturned | Paused | StateReceived | ReceiveFailed | WorkFailed | StateApplied
    | StateTorn | StateUntouched | Restored | DataEnded | DataBack | DrainOrdered | StopWanted | LeaveWanted | ShutDown
    | Tick
)  # fmt: skip
