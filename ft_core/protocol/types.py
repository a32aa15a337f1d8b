"""What travels between the machines of the protocol: versions, asks, quorums, verdicts. Values only. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Identity of a state: the step, and the quorum_id in which the last commit was made. Compared in this order."""

    step: int
    quorum_id: int

    def __str__(self) -> str:
        return "void" if self.step < 0 else f"step {self.step}"


UNTRAINED = Version(0, 0)
VOID = Version(-1, -1)
"""A state that must not be used: torn by a heal that did not finish, or mixed within its group."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One replica group's wish to be in the next quorum. Irrevocable; with the same `seq` it is the same ask.

    Presented again, with the same or with news of its links, it gets the answer it had.
    """

    replica_id: str
    seq: int
    version: Version = UNTRAINED
    lineage: int = 0
    quorum_id: int = 0
    """The quorum the group leaves by asking; 0 if it was in none."""
    failed: bool = False
    """The data plane of that quorum broke under this group: a second witness to a dropped lease."""
    reason: str = ""
    min_replicas: int = 1
    group_world_size: int = 1
    heal_addresses: tuple[str, ...] = ()
    store_address: str = ""
    address: str = ""
    signature: int = 0
    signature_lines: tuple[str, ...] = ()
    """One line per parameter, in a group's first ask only: to name the first difference to the room's model."""
    init_sync: bool = True
    allow_heal: bool = True
    shrink_only: bool = False
    heals_before_forward: bool = False
    heals_late: bool = False
    """Its last heal failed when the others counted on it: they do not, until it holds their state (R11)."""
    from_scratch: bool = False
    """It may begin at step 0 although the job has committed: its user says so, or it has loaded a checkpoint (R21)."""
    commit_failures: int = 0
    data: str = ""
    unbuilt: str = ""
    """Why it could not build the process group of that quorum; `unbuilt_here`: because of its own machine."""
    unbuilt_here: bool = False
    stable: Version = VOID
    """The newest version it knows to be held by its whole quorum (R2): newer than its last report, perhaps."""
    unreachable: tuple[str, ...] = ()
    """Members of its last quorum to which it could open no connection; `reached`: those to which it could."""
    reached: tuple[str, ...] = ()
    moves: bool = False
    """Of a rank to its leader: its attempt, of which nothing was launched, is to go on in the next quorum (R19)."""
    position: int = 0
    """The batch of the training data that its script trains on next, counted from 1; 0: it does not say."""
    cast: bool = True
    """It has given a ballot in the quorum that it leaves; `fenced`: a fence of it has completed, so all entered it."""
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One group in a quorum: what the others need to know of its ask."""

    replica_id: str
    version: Version
    lineage: int
    group_world_size: int = 1
    heal_addresses: tuple[str, ...] = ()
    store_address: str = ""
    address: str = ""
    init_sync: bool = True
    allow_heal: bool = True
    shrink_only: bool = False
    heals_before_forward: bool = False
    heals_late: bool = False
    previous_quorum_id: int = 0
    commit_failures: int = 0
    data: str = ""
    position: int = 0

    @staticmethod
    def of(ask: Ask) -> Member:
        """The part of an ask that goes into the quorum."""
        return Member(
            replica_id=ask.replica_id, version=ask.version, lineage=ask.lineage,
            group_world_size=ask.group_world_size, heal_addresses=ask.heal_addresses,
            store_address=ask.store_address, address=ask.address, init_sync=ask.init_sync,
            allow_heal=ask.allow_heal, shrink_only=ask.shrink_only,
            heals_before_forward=ask.heals_before_forward, heals_late=ask.heals_late, previous_quorum_id=ask.quorum_id,
            commit_failures=ask.commit_failures, data=ask.data, position=ask.position,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Basis:
    """A quorum out of which the next one may grow (R22): one whose members may still go on in it."""

    quorum_id: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quorum:
    """An agreed member list, sorted by replica_id; a member's index is its replica_rank."""

    quorum_id: int
    members: tuple[Member, ...]
    created_ms: int = 0
    after: tuple[Basis, ...] = ()
    """What it grew out of (R22); only under a lighthouse that has a partner."""
    ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """replica_ids in rank order; one tuple, which a room keeps for every member."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(member.replica_id for member in self.members))

    def rank_of(self, replica_id: str) -> int:
        """replica_rank of a member. Raises ValueError if it is not in this quorum."""
        return next(rank for rank, member in enumerate(self.members) if member.replica_id == replica_id)


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
    """The data pass is over: every member is out of it (R16), or one of them ends it for all."""
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
    own_weight: int | None = None
    """Of a rank to its leader, where the ranks of a group must set the same batch weight: the one that it set."""
    own_weights: tuple[int, ...] = ()
    """Of a leader to its ranks: the batch weights that they have set, if these differ and must not."""
