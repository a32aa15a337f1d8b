"""The rules of admission to a room, and the sentences that name whose fault a refusal is and what to do. Pure.

How it works. A newcomer is compared with the replicas of the room that are not certainly gone: its id may not be that
of another live process, there has to be a place for it in a quorum, its model, data and rules may not be other ones
(R4: collectives are aligned), and its group has to have as many ranks as theirs, because rank i of every group trains
with rank i of all others. Who asked first defines both; when everybody who has it is gone, another one is as good.

Invariant: a replica that is in a quorum is never refused because of one that is in none; then the latter is. (A
lighthouse that has just started receives them in any order.)
Ownership: `room.Room` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import Hello, Refuse
from ft_core.protocol.lighthouse.model_signature import RoomSignature, difference
from ft_core.protocol.lighthouse.view import ABSENT, Life
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ft_core.protocol.lighthouse.events import Left
    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.rules import Rules
    from ft_core.protocol.types import Ask, Version


class Refusals:
    """The model that the replicas of one room have in common, and who is refused because of it."""

    def __init__(self) -> None:
        self._signature: RoomSignature | None = None
        self._size = 0
        """The number of ranks that each group has which asks or is in the quorum; 0: it has to be looked up."""

    def __repr__(self) -> str:
        return f"Refusals({self._signature.holder if self._signature else 'no signature known'})"

    def of_hello(
        self, hello: Hello, strange: str, records: Mapping[str, Record], closed: str, rules: Rules
    ) -> list[Refuse]:
        """Refuse the sender of a hello, or those who cannot stay beside it.

        Args:
            hello: what was presented.
            strange: what is wrong with the ids it names.
            records: of the room.
            closed: why the room is closed; '': it is not.
            rules: in force.
        """
        refusal = Refuse(hello.replica_id, strange) if strange else _of_identity(hello, records, closed)
        refusal = refusal or _of_places(hello, records)
        return [refusal] if refusal else self.of_signature(hello, records, hello.quorum_id, rules)

    def of_signature(
        self, shown: Hello | Ask, records: Mapping[str, Record], quorum_id: int, rules: Rules
    ) -> list[Refuse]:
        """Refuse a replica with this signature, or those with another one.

        A room trains one model (R4). The first signature seen stands while anybody who has it is there, unless nobody
        of these is in a quorum, and the newcomer is.

        Args:
            shown: what it presents of itself.
            records: of the room.
            quorum_id: the quorum that it is in; 0: none.
            rules: in force.
        """
        replica_id, signature, lines = shown.replica_id, shown.signature, shown.signature_lines
        member = quorum_id > 0 and rules.r4_members
        if not signature:
            return []
        known = self._signature
        if known is not None and signature != known.digest:
            holders = {
                i: r
                for i, r in records.items()
                if r.life is Life.UP and r.hello.signature == known.digest and i != replica_id
            }
            if holders and not (member and not any(r.hello.quorum_id for r in holders.values())):
                return [Refuse(replica_id, difference(replica_id, lines, known))]
            known = None
            if holders:
                self._signature = RoomSignature(signature, lines, replica_id)
                return [Refuse(i, difference(i, r.hello.signature_lines, self._signature)) for i, r in holders.items()]
        if known is None or (lines and not known.lines):
            self._signature = RoomSignature(signature, lines, replica_id)
        return []

    def of_ask(
        self,
        ask: Ask,
        strange: str,
        records: Mapping[str, Record],
        quorum_id: int,
        members: Collection[str],
        rules: Rules,
    ) -> list[Refuse]:
        """Refuse an ask, or those who cannot stay beside who asks so; the arguments as in the other two."""
        refused = [Refuse(ask.replica_id, strange)] if strange else self.of_signature(ask, records, quorum_id, rules)
        if any(refusal.to == ask.replica_id for refusal in refused):
            return refused
        return refused + self.of_sizes(ask, records, members)

    def of_sizes(self, shown: Hello | Ask, records: Mapping[str, Record], members: Collection[str]) -> list[Refuse]:
        """Refuse groups that cannot stay in the room now that one of this size is there.

        All groups of a job are of one size, and this is asked with each of their messages: the others are looked at
        only if it is another one than the last time. What a client of the unary calls has is known when it asks.

        Args:
            shown: what the group presents of itself.
            records: of the room.
            members: of the quorum in force.
        """
        size = shown.group_world_size
        if size == self._size:
            return []
        self._size = 0
        if isinstance(shown, Hello) and shown.unary:
            return []
        refused, differ = _of_sizes(shown.replica_id, size, records, members)
        self._size = 0 if differ else size
        return refused

    def forget_size(self) -> None:
        """Somebody may be in the quorum, or ask, whose size was not compared."""
        self._size = 0


def _of_identity(hello: Hello, records: Mapping[str, Record], closed: str) -> Refuse | None:
    """A closed room takes nobody new, and an id is taken as long as its process may live."""
    replica_id, record = hello.replica_id, records.get(hello.replica_id)
    if closed and (record is None or record.life is Life.GONE) and hello.quorum_id == 0:
        return Refuse(replica_id, closed, finished=True)
    if record is None:
        return None
    if record.is_other_process(hello) and record.life in (Life.CLOSED, *ABSENT) and not record.presumed_dead:
        how = "went silent" if record.life is Life.MISSED else "lost its connection"
        return Refuse(
            replica_id,
            f"an earlier process called {replica_id!r} {how} and may still be training: give the new "
            "one its own replica_id, or report the end of the old one",
        )
    if record.hello.incarnation != hello.incarnation and record.life is Life.UP:
        return Refuse(
            replica_id,
            f"two live processes call themselves {replica_id!r}: give every replica group its own "
            "replica_id (FT_REPLICA_ID)",
        )
    return None


def _of_places(hello: Hello, records: Mapping[str, Record]) -> Refuse | None:
    """A newcomer needs a place in a quorum. A process that takes the place of an earlier one of its name has one."""
    if hello.quorum_id or hello.replica_id in records or len(records) < MAX_REPLICAS:
        return None
    names = {r.hello.name or i for i, r in records.items() if r.life is Life.UP}
    if len(names) < MAX_REPLICAS or (hello.name or hello.replica_id) in names:
        return None
    return Refuse(
        hello.replica_id,
        f"{len(names)} replica groups are here, and a quorum holds at most {MAX_REPLICAS}: there is no place for "
        f"{hello.replica_id}. Run fewer groups with more ranks each, or another job at another lighthouse or room",
    )


def earlier_process(hello: Hello, records: Mapping[str, Record]) -> str:
    """Another admitted, living replica of the same name; '' if there is none. `records`: all of that name."""
    for replica_id, other in records.items():
        same = other.hello.name == hello.name and replica_id != hello.replica_id
        if same and hello.name and not hello.unary and other.life is Life.UP and not other.same_name_until:
            return replica_id
    return ""


def same_name(earlier: str, hello: Hello) -> Refuse:
    """The refusal of a process whose name a living one has."""
    reason = f"{earlier} and {hello.replica_id} are both alive and both called {hello.name!r}"
    return Refuse(hello.replica_id, f"{reason}: give every replica group its own FT_REPLICA_ID (replica_id)")


def closed_by(room: str, last: Left) -> str:
    """The sentence for whoever comes after a replica has finished."""
    return (
        f"training in room {room!r} finished at {last.version} ({last.replica_id}); start a new lighthouse or another "
        "room to train again"
    )


def too_late(records: Mapping[str, Record], reason: str, finished: Version) -> list[Refuse]:
    """Refuse those who wait for a quorum that no trained replica is left to form. Their asks are over."""
    waiting = {i: r for i, r in records.items() if r.ask is not None and r.ask.version.step < finished.step}
    for record in waiting.values():
        record.ask = None
    return [Refuse(i, reason, finished=True) for i in sorted(waiting)]


def _of_sizes(
    replica_id: str, size: int, records: Mapping[str, Record], members: Collection[str]
) -> tuple[list[Refuse], bool]:
    """Who is refused, and whether there are groups of different sizes."""
    others = {
        i: r.hello.group_world_size
        for i, r in records.items()
        if i != replica_id and r.life is not Life.GONE and (r.ask is not None or i in members)
    }
    differing = sorted(i for i, other in others.items() if other != size)
    if not differing:
        return [], False
    if replica_id not in members:
        return [Refuse(replica_id, _other_size(replica_id, size, differing[0], others[differing[0]]))], True
    return [Refuse(i, _other_size(i, others[i], replica_id, size)) for i in differing if i not in members], True


def _other_size(replica_id: str, size: int, other_id: str, other: int) -> str:
    return (
        f"the replica group {replica_id} has {_ranks(size)}, but {other_id} has {other}: all groups of a job need the "
        f"same number of ranks (world_size; ftrun --nproc-per-replica). Start {replica_id} with {_ranks(other)}; for a "
        "job of another size, end all groups of this one first, or use another lighthouse or room"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
