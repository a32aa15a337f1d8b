"""`CurrentQuorum`: the quorum that is in force in a room, what was reported of it, and whether it has ended. Pure.

How it works. A quorum comes into force when it is formed, or when it is presented to a lighthouse that knows none (R9).
It ends when a member asks after it, leaves, or is certainly gone, never because connections closed (R1); but one that
reported no commit, and of which nobody came back, is presumed to be over. Where there are two lighthouses, that it has
ended means that this one need not wait for it; whether it may go on under the other one is `succession`'s to know.

Invariants: beside the fields; `validate` checks them. Ownership: `room.Room` only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.absence import presume_over
from ft_core.protocol.lighthouse.view import Current, Life

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.replica_table import ReplicaTable
    from ft_core.protocol.lighthouse.rules import Rules
    from ft_core.protocol.types import Ask, Quorum


NOBODY: frozenset[str] = frozenset()


class CurrentQuorum:
    """The quorum in force in one room; none before the first."""

    def __init__(self) -> None:
        self.value: Current | None = None
        """Its id, members and end. One id names one member list; it has ended if a member is gone."""
        self.formed: Quorum | None = None
        """The last quorum that was formed under this boot. While it is in force, all its members have records."""
        self.trained = False
        """A commit made in it was reported, or may have been, because it was adopted."""
        self.presumed_over = 0
        """The last quorum_id that was taken as ended because all connections closed before a commit was reported."""
        self.waiting: frozenset[str] = frozenset()
        """Joiners for whom its members were last asked to agree on a new one: once per set. None of its members."""
        self._began_at = 0
        """The newest step that a member of `formed` came with."""
        self._failed = 0
        """The quorum_id that a member last reported as broken."""
        self._told = 0
        """The quorum_id whose members were last notified that one of them left it."""

    def __repr__(self) -> str:
        return f"CurrentQuorum({self.value})"

    @property
    def members(self) -> tuple[str, ...]:
        """Its members; empty: there is none."""
        return self.value.members if self.value is not None else ()

    @property
    def among(self) -> frozenset[str]:
        """Its members, to be looked up in: a list of a thousand takes as long to search as a message to decode."""
        return self.value.among if self.value is not None else NOBODY

    @property
    def is_presumed_over(self) -> bool:
        """That it can complete nothing more is likely, and not certain: no member has asked, left, or surely ended."""
        value = self.value
        return value is not None and (not value.ended or self.presumed_over == value.quorum_id)

    def validate(self, table: ReplicaTable, *, settled: bool = True) -> None:
        """Raise AssertionError unless what the fields promise holds. `settled`: all consequences are drawn."""
        value = self.value
        if value is None:
            assert self.formed is None
            assert not self.trained
            assert not self.waiting
            return
        assert len({*value.members}) == len(value.members) > 0
        assert not self.waiting.intersection(value.members)
        assert value.ended or not settled or all(record.life is not Life.GONE for record in table.named(value.members))
        if self.formed is not None and self.formed.quorum_id == value.quorum_id:
            assert self.formed.ids == value.members, "one id, two lists"
            assert all(replica_id in table.records for replica_id in value.members)

    # ------------------------------------------------------------ begin and end

    def form(self, quorum: Quorum) -> None:
        """A quorum was formed."""
        self.value, self.formed = Current(quorum.quorum_id, quorum.ids, ended=False), quorum
        self.trained, self.waiting = False, frozenset()
        self._began_at = max(0, *(member.version.step for member in quorum.members))

    def adopt(self, quorum_id: int, members: tuple[str, ...], now: float, *, ended: bool) -> None:
        """A quorum that was formed by another lighthouse, or before this one was started, was presented (R9)."""
        self.value = Current(quorum_id, members, ended, now)
        self.trained, self.waiting = True, frozenset()

    def end(self, now: float) -> None:
        """It can complete nothing more. Again: no effect."""
        if self.value is not None and not self.value.ended:
            self.value = replace(self.value, ended=True, ended_at=now)

    def end_if_over(self, members: Sequence[Record], now: float, rules: Rules) -> None:
        """End it if a member is certainly gone, or if it is presumed to be over."""
        value = self.value
        if value is None or value.ended:
            return
        if any(record.life is Life.GONE for record in members):
            self.end(now)
        elif not self.trained and rules.r1_closed and presume_over(members):
            self.presumed_over = value.quorum_id
            self.end(now)

    def is_in_force(self, quorum_id: int) -> bool:
        """Whether it is this one and has not ended."""
        return self.value is not None and self.value.quorum_id == quorum_id and not self.value.ended

    # ------------------------------------------------------------ what is reported of it

    def is_left_by(self, ask: Ask, answered: tuple[int, Quorum] | None) -> bool:
        """Whether a replica that asks so leaves it. `answered`: its last ask and the quorum that answered that."""
        value = self.value
        if value is None or ask.replica_id not in value.among:
            return False
        if ask.quorum_id >= value.quorum_id:
            return True
        if self.formed is None or self.formed.quorum_id != value.quorum_id:
            return True  # it is asked for here on its only stream, and its answer would have come on an earlier one
        # It asked again without having taken the answer that put it into this quorum (its caller timed out).
        return answered is not None and answered[1].quorum_id == value.quorum_id and ask.seq > answered[0]

    def report_left(self, ask: Ask) -> bool:
        """A member that asks so leaves it. True: it broke, or never came, and nobody was notified of that before."""
        assert self.value is not None
        quorum_id = self.value.quorum_id
        if ask.failed:
            self._failed = quorum_id
        broke, never_came = ask.failed and ask.quorum_id == quorum_id, ask.quorum_id < quorum_id
        if not (broke or never_came):
            return False
        first, self._told = self._told != quorum_id, quorum_id
        return first

    def was_reported_failed(self, replica_id: str) -> bool:
        """Whether a member has reported that the quorum broke which this replica is in."""
        return self.value is not None and replica_id in self.value.among and self._failed == self.value.quorum_id

    def report_step(self, replica_id: str, step: int) -> None:
        """A replica reports its step: perhaps one that was committed in this quorum."""
        value, formed = self.value, self.formed
        if not self.trained and formed is not None and value is not None:
            same = formed.quorum_id == value.quorum_id and replica_id in value.among
            self.trained = same and step > self._began_at
