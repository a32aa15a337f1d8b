"""The claims about a room's state that count: those of replicas that were in its quorums, others once confirmed (R18).

A claim is what would overrule others: a quorum that is presented after a restart (R9), a version newer than everybody's
or reported as stable (R2), the end of training (R16), waiting times. A replica is *proven* once it was in a quorum that
this lighthouse formed, or is named in the one that it adopted, or in the last one that the other lighthouse of a pair
has told of: the room's quorums are those of both. While a proven replica is connected, an unproven one's
claims count for nothing: it may join, and receives the room's state. What confirms them is the room itself: a version
that is no newer than the newest which a proven replica reported, a commit made in a quorum of the room, or, after a
restart, a second member that presents the same quorum.

While nobody proven is connected, at a start, after a restart, or after everybody has died, there is no one to compare
with, and claims count as they come: a job that resumes from a checkpoint has the newest state. Only what a stranger
reports as stable does not make anybody wait any more once a quorum has formed.

Invariant: claims change who is believed, never who is alive. Ownership: `room.Room` only. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.types import VOID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.rules import Rules
    from ft_core.protocol.lighthouse.view import Current
    from ft_core.protocol.types import Ask, Basis, Version

CONNECTED = (Life.UP, Life.CLOSED, Life.UNKNOWN)
"""It has a lease, or may return in a moment."""
CONFIRMED_BY = 2
"""Members that have to present the same quorum after a restart, to be believed against another one."""


class Claims:
    """The part of the replicas' claims that one room believes."""

    def __init__(self) -> None:
        self.known = VOID
        """The newest version that a proven replica reported."""
        self.furthest = 0
        """The newest step that a member of the last quorum is known to have committed, or to have come with (R21)."""
        self.formed = False
        """This lighthouse has formed a quorum of the room: what was before it needs no more discovery."""

    def __repr__(self) -> str:
        return f"Claims(known={self.known})"

    # ------------------------------------------------------------ what is learned

    def reported(self, record: Record, version: Version, step: int = 0) -> None:
        """A replica reported a version, as its own or as stable, and perhaps the `step` that it has committed last."""
        if not record.proven and record.answered is not None and version.quorum_id == record.answered[1].quorum_id:
            record.proven, record.stable = True, version  # it commits with the others; what it held before is over
        if record.proven:
            self.known = max(self.known, version)
            self.furthest = max(self.furthest, version.step, step)

    def introduced(self, record: Record, theirs: Basis, rules: Rules) -> None:
        """A replica has opened its lease. `theirs`: the last quorum that the other lighthouse has told of."""
        if rules.r22_proven and record.hello.replica_id in theirs.members:
            record.proven = True

    def adopted(self, members: tuple[str, ...], theirs: Basis, records: Mapping[str, Record], rules: Rules) -> None:
        """A quorum was adopted: its members are those who count, and those of the other lighthouse's (`theirs`)."""
        if not self.formed:
            self.known = VOID  # of what the members of the one before reported nothing may be true
        for replica_id, record in records.items():
            named = replica_id in members or (rules.r22_proven and replica_id in theirs.members)
            record.proven = named or (self.formed and record.proven)
            if named:
                self.reported(record, max(record.stable, record.hello.version))

    def joined(self, asks: tuple[Ask, ...], records: Mapping[str, Record]) -> list[str]:
        """A quorum was formed of these asks. Returns a sentence for each member whose version was not believed."""
        self.formed = True
        doubted = []
        self.known = max(self.known, *(ask.version for ask in asks))
        self.furthest = max(0, *(ask.version.step for ask in asks))
        for ask in asks:
            record = records[ask.replica_id]
            if record.ask is not None and record.ask.version != ask.version:
                doubted.append(
                    f"{ask.replica_id} comes with {record.ask.version}, newer than all that this room has seen "
                    f"({self.known}), and was in no quorum of it: it receives the room's state. To go on from what it "
                    "brought, end the running groups first"
                )
            else:
                record.proven = True
        return doubted

    def ended(self, leaver: Record, records: Mapping[str, Record], *, over: bool) -> None:
        """A replica said goodbye. `over`: its script has ended; if it was the last, its state is not missed (R21)."""
        if leaver.proven:
            self.furthest = max(self.furthest, leaver.left_with.step)
        if over and leaver.proven and not any(r.proven and r.life is not Life.GONE for r in records.values()):
            self.furthest = 0

    # ------------------------------------------------------------ what counts

    def settled(self, records: Mapping[str, Record], current: Current | None, rules: Rules) -> bool:
        """Whether there is somebody against whom claims can be held."""
        if not rules.r18_claims or current is None or not (self.formed or presenters(records, current) >= CONFIRMED_BY):
            return False
        return any(r.proven and not r.hello.unary and r.life in CONNECTED for r in records.values())

    def counts(self, record: Record, version: Version, *, settled: bool) -> bool:
        """Whether a version this replica reports is believed."""
        return not settled or record.proven or version <= self.known

    def stable(self, record: Record, *, settled: bool) -> Version:
        """The version that it is believed to hold as stable (R2); once a quorum has formed, also while it is alone."""
        return record.stable if self.counts(record, record.stable, settled=settled or self.formed) else VOID

    def ask(self, record: Record, *, settled: bool) -> Ask | None:
        """Its ask, with the version that is believed."""
        ask = record.ask
        if ask is None or self.counts(record, ask.version, settled=settled):
            return ask
        return replace(ask, version=VOID)

    def overrules(
        self, hello: Hello, record: Record, records: Mapping[str, Record], current: Current, rules: Rules,
        vouched: int = 0,
    ) -> bool:  # fmt: skip
        """Whether the quorum that a replica presents takes the place of `current`.

        `vouched`: the quorum of which the other lighthouse has told: it needs no second presenter.
        """
        newer = hello.quorum_id > current.quorum_id
        if record.proven or not rules.r18_claims:
            return newer
        if self.formed:
            return False
        presented = replace(current, quorum_id=hello.quorum_id, members=hello.members)
        ours = current.quorum_id == vouched or presenters(records, current) >= CONFIRMED_BY
        theirs = presenters(records, presented) >= CONFIRMED_BY
        return newer if ours == theirs else theirs


def presenters(records: Mapping[str, Record], quorum: Current) -> int:
    """How many of its members are connected and present this quorum."""
    mine = quorum.quorum_id, quorum.members
    found = (r for i in quorum.members if (r := records.get(i)) is not None and r.life is Life.UP)
    return sum((r.hello.quorum_id, r.hello.members) == mine for r in found)
