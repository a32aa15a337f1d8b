"""What the two lighthouses of a pair know of each other, and tell each other (R22). Values only. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from ft_core.protocol.types import VOID, Basis, Version

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

MAX_TOLD = 16
"""Quorums that the next one has to grow out of, or that may go on elsewhere, in one report of a room."""


@dataclass(frozen=True, slots=True)
class Partner:
    """The other lighthouse, as a room has to know it."""

    address: str = ""
    """Where it is, for messages; '': there is none, and this lighthouse decides alone."""
    stands_by: bool = False
    """It can be reached and stands by: it records what is proposed to it."""
    informed: bool = False
    """Since its own start this lighthouse has been told once what the other one knows."""
    since: float = 0.0
    """When they first met in the life that both are in now; until then either may have forgotten something."""
    met_at: float = 0.0
    """When the connection between them that stands now was opened."""
    silent_at: float = inf
    """When contact ends if nothing more is heard of it. Who was frozen may not have noticed yet that it has ended."""


ALONE = Partner()


@dataclass(frozen=True, slots=True)
class Told:
    """What one lighthouse knows of a room: enough for the other one to go on in its place."""

    room: str
    quorum_id: int = 0
    members: tuple[str, ...] = ()
    """The quorum in force; 0 and (): there is none."""
    ended: bool = False
    """It can complete nothing more."""
    bases: tuple[Basis, ...] = ()
    """What the next quorum has to grow out of."""
    furthest: int = 0
    """The newest step that is known to be committed (R21)."""
    closed: str = ""
    finished: Version = VOID
    """Why nobody may join any more, and the version that a finished replica held."""
    merged: tuple[int, ...] = ()
    """Quorums of the receiver's that the sender knows of, and has taken into account."""
    entered: int = 0
    """The one of `bases` that all its members are known to have entered; 0: none, all of them are attempts."""
    orphan_s: float = 0.0
    """For how long its replicas may train without a lease; 0: not known."""
    elsewhere: tuple[Basis, ...] = ()
    """Quorums that may go on beside the one in force."""

    @property
    def ids(self) -> frozenset[int]:
        """The quorums it is about."""
        return frozenset({self.quorum_id, *(basis.quorum_id for basis in (*self.bases, *self.elsewhere))} - {0})


@dataclass(frozen=True, slots=True)
class Proposal:
    """A quorum that is announced once the other lighthouse has recorded it."""

    room: str
    quorum_id: int
    members: tuple[str, ...]
    bases: tuple[Basis, ...]
    """What the next one has to grow out of, this one included."""
    over: tuple[int, ...] = ()
    """Quorums that can complete nothing more, as the proposer knows."""
    presumed: bool = False
    """That the last one has ended is not certain: nobody of it had a lease for orphan_s."""
    orphan_s: float = 900.0
    furthest: int = 0
    entered: int = 0
    """The one of `bases` that all its members are known to have entered; 0: none."""


def together(told: Sequence[Told]) -> Told:
    """One report of several of the same room: the newest quorum is in force, an older one may go on elsewhere."""
    last = max(told, key=lambda one: one.quorum_id)
    entered = max(one.entered for one in told)
    older = [Basis(t.quorum_id, t.members) for t in told if not t.ended and 0 < t.quorum_id < last.quorum_id]
    elsewhere = {basis for one in told for basis in one.elsewhere} | {*older}
    bases = sorted({basis for one in told for basis in one.bases if basis.quorum_id >= entered}, key=_id_of)
    closed, finished = max((one.closed, one.finished) for one in told)
    return replace(
        last,
        bases=(*bases[:1], *bases[1:][-MAX_TOLD + 1 :]),
        elsewhere=tuple(sorted((b for b in elsewhere if b.quorum_id >= entered), key=_id_of))[-MAX_TOLD:],
        entered=entered,
        furthest=max(one.furthest for one in told),
        orphan_s=max(one.orphan_s for one in told),
        closed=closed,
        finished=finished,
        merged=tuple(sorted({quorum_id for one in told for quorum_id in one.merged}))[-4 * MAX_TOLD :],
    )


def _id_of(basis: Basis) -> int:
    return basis.quorum_id


def newest(bases: Iterable[Basis]) -> int:
    """The highest quorum_id among them; 0: there are none."""
    return max((basis.quorum_id for basis in bases), default=0)


def most_of(basis: Basis, ids: Collection[str]) -> bool:
    """Whether more than half of its members are among these; of two halves the one with the first member is."""
    here = sum(member in ids for member in basis.members)
    return 2 * here > len(basis.members) or (2 * here == len(basis.members) and basis.members[0] in ids)
