"""`Pair`: one of two lighthouses that share a job: which of them serves, and what each tells the other (R22). Pure.

How it works. Each sends the other reports: who it is, what it does, whom it hears, and what it knows of each room. They
are in *contact* while each hears the other. In contact one of them serves (`ACTIVE`) and the other stands by: it takes
no lease and no ask, it writes down what it is told and records what is proposed to it. One that stands by serves as
soon as the contact is lost. Silence for a liveness timeout ends it, and what is heard next does not mend it: if this
one was frozen that may be as old as the freeze. So out of contact both may serve; what keeps them from forming two
quorums beside each other is `succession`, not this.

When contact is made, a complete report goes each way before anything else. If both serve then, the one with fewer
leases stands by; if neither does, the one of the lower number serves. One that has just started waits START_S for the
other before it serves.

A room that makes place for another one is written down as well, as long as somebody may train in it out of reach: until
nobody of it can have had a lease at either lighthouse for orphan_s.

Invariants: one that stands by never accepts a proposal about a room in which it knows of a quorum that the proposer
does not (`accepts`). What this one knew is kept until the other has taken it into account. At most MAX_NOTES rooms are
written down; one that had to forget a room which may go on is not `informed` any more, as after a restart. Ownership:
one event loop (or the simulation) calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import PartnerIs, PartnerTold, Recorded
from ft_core.protocol.lighthouse.partner import Partner, Proposal, Told, newest, together
from ft_core.protocol.lighthouse.room_keeping import MAX_ROOMS

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Sequence

    from ft_core.protocol.lighthouse.events import Event

START_S = 1.0
"""After its start a lighthouse waits for the other one for so long before it serves (seconds)."""
MAX_NOTES = 2 * MAX_ROOMS
"""Rooms that are written down: all those that the other one serves, and as many of which replicas may be away."""
REPORTS_PER_LIVENESS = 4
"""Reports per liveness timeout when nothing changes: silence for a whole one is the end of the contact."""


class Role(Enum):
    """What a lighthouse of a pair does."""

    STARTING = "starting"
    ACTIVE = "active"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Report:
    """What one lighthouse sends the other."""

    boot: int
    """A random number, one per start."""
    role: Role
    hears: int
    """The `boot` of the receiver, if the sender hears it; 0: it does not."""
    contact: bool = False
    """It is in contact with the receiver, who has told it all that it knows."""
    leases: int = 0
    told: tuple[Told, ...] = ()
    """What it knows of these rooms."""
    complete: bool = False
    """With these it has reported all rooms that it knows of."""
    proposals: tuple[Proposal, ...] = ()
    answers: tuple[tuple[int, bool], ...] = ()
    """(quorum_id, whether it is recorded) of proposals of the receiver's."""


# ---------------------------------------------------------------- what the shell does


@dataclass(frozen=True, slots=True)
class Send:
    """Send the other lighthouse this report."""

    report: Report


@dataclass(frozen=True, slots=True)
class Serve:
    """Take leases from now on; rooms are made anew, out of `Pair.known`."""


@dataclass(frozen=True, slots=True)
class StandBy:
    """End all leases: their clients are to go to the other lighthouse. What the rooms know was asked for before."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Hand an event to a room; '': to all of them."""

    room: str
    event: Event


Action = Send | Serve | StandBy | Feed


@dataclass(slots=True)
class _Notes:
    own: Told | None = None
    """What this one knew when it stopped serving, until the other has taken it into account."""
    theirs: Told | None = None
    since: float = float("-inf")
    """Since when nobody of it has had a lease here."""

    @property
    def told(self) -> tuple[Told, ...]:
        """What is written down."""
        return tuple(told for told in (self.own, self.theirs) if told is not None)

    def over(self, partner: Partner, now: float) -> bool:
        """Nothing of it goes on: for orphan_s nobody can have had a lease, here or at the other one, which stands by.

        That its quorum has ended is not enough: another one may have followed out of reach, and would be contradicted.
        """
        if all(told.closed or not told.ids for told in self.told):
            return True
        orphan_s = max((told.orphan_s or float("inf")) for told in self.told)
        return partner.stands_by and now >= max(self.since, partner.met_at) + orphan_s


@dataclass(slots=True)
class Pair:
    """One lighthouse's half of the pair.

    Args:
        boot: a random number, one per start.
        address: of the other lighthouse, for messages.
        liveness_s: silence after which the contact is lost.
        started: the instant of its start (s).
    """

    boot: int
    address: str
    liveness_s: float
    started: float
    role: Role = Role.STARTING
    contact: bool = False
    partner: Partner = field(init=False)
    _partner_boot: int = 0
    _partner_role: Role = Role.STARTING
    _hears_me: bool = False
    _contact_there: bool = False
    """The other one, too, is in contact."""
    _heard_at: float = float("-inf")
    _first_met: float = 0.0
    """When contact was first made with the other one's life; 0.0: not yet."""
    _notes: dict[str, _Notes] = field(default_factory=dict)
    _leases: int = 0
    overrun: bool = False
    """It had to forget a room that may go on."""

    def __post_init__(self) -> None:
        self.partner = Partner(self.address)

    @property
    def serves(self) -> bool:
        """It takes leases."""
        return self.role is Role.ACTIVE

    @property
    def tells_all(self) -> bool:
        """The next report has to be complete: one of the two is not in contact, or does not know it."""
        return not (self.contact and self._contact_there)

    @property
    def next_at(self) -> float:
        """When to call `tick` if nothing happens before."""
        if self._hears:
            return self._heard_at + self.liveness_s
        return self.started + START_S if self.role is Role.STARTING else float("inf")

    @property
    def _hears(self) -> bool:
        return self._heard_at > float("-inf")

    def known(self, room: str) -> tuple[Told, ...]:
        """What is written down about a room: for one that is made anew."""
        return self._notes.get(room, _Notes()).told

    def all_known(self, served: Container[str] = ()) -> list[Told]:
        """What is written down about all rooms but those that are served now: part of each complete report."""
        return [together(notes.told) for name, notes in self._notes.items() if name not in served and notes.told]

    def report(self, leases: int, told: Sequence[Told] = (), *, complete: bool = False) -> Report:
        """What to send the other one now. `told`: what the rooms know, of one that serves."""
        self._leases = leases
        return Report(
            self.boot, self.role, self._partner_boot if self._hears else 0, self.contact, leases, tuple(told), complete
        )

    # ------------------------------------------------------------ events

    def is_stranger(self, report: Report, now: float) -> bool:
        """Whether it comes from a third lighthouse: the other one is in contact, and this is not its report."""
        return self.contact and report.boot != self._partner_boot and now < self._heard_at + self.liveness_s

    def heard(self, report: Report, now: float, leases: int) -> list[Action]:
        """A report of the other lighthouse has arrived."""
        out: list[Action] = []
        self._leases = leases
        if report.boot != self._partner_boot:
            self._partner_boot, self._first_met = report.boot, 0.0
            self._lose(out)
        if now >= self._heard_at + self.liveness_s:
            self._lose(out)  # this one was frozen: what it reads first may be as old as that
        for told in report.told:
            self._note(told, now, out)
        new = not self._hears
        self._heard_at, self._partner_role, self._hears_me = now, report.role, report.hears == self.boot
        self._contact_there = report.contact
        if not self._hears_me:
            self._lose(out, silent=False)
            if new:
                out.append(Send(self.report(leases)))  # so that it learns that it is heard
            return out
        if not self.contact and not report.complete:
            return [*out, Send(self.report(leases, complete=False))] if new else out
        if not self.contact:
            self.contact = True
            self._first_met = self._first_met or now
            self.partner = replace(self.partner, since=self._first_met, met_at=now)
        informed = not self.overrun if report.complete else self.partner.informed
        self.partner = replace(self.partner, informed=informed, silent_at=now + self.liveness_s)
        self._choose(report, out)
        self._look(out)
        out += [self._record(proposal, now, leases) for proposal in report.proposals]
        out += [Feed("", Recorded(quorum_id, accepted)) for quorum_id, accepted in report.answers]
        return out

    def ended(self) -> list[Action]:
        """The other one's connection has ended."""
        out: list[Action] = []
        self._heard_at = float("-inf")
        self._lose(out)
        return out

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        out: list[Action] = []
        if self._hears and now >= self._heard_at + self.liveness_s:
            return self.ended()
        if self.role is Role.STARTING and not self.contact and now >= self.started + START_S:
            self._become(Role.ACTIVE, out)
        return out

    def stops(self, room: Told, now: float) -> None:
        """It stops serving: what a room knows is kept until the other one has taken it into account."""
        self._notes_of(room.room, now).own = room

    def makes_place(self, room: str, served: Collection[str], now: float) -> list[Action] | None:
        """Whether the two may know of one more room, which is to be served. None: they may not, as long as replicas may
        train in all that they know of. `served`: those that are served now."""
        known = len(self._notes) + sum(name not in self._notes for name in served)
        if room in self._notes or known < MAX_NOTES:
            return []
        over = self._forget(now, served)
        return None if over is None else [Send(self.report(self._leases, (over,)))]

    def keeps(self, room: Told, since: float) -> None:
        """A room that it serves makes place for another one: what is known of it is written down.

        Args:
            room: what is known of it.
            since: when the last lease in it ended.
        """
        self._notes[room.room] = _Notes(room, None, since)  # it has taken into account all that it was told

    # ------------------------------------------------------------ what follows

    def _lose(self, out: list[Action], *, silent: bool = True) -> None:
        """The other one cannot be reached, as far as this one can tell."""
        if silent:
            self._heard_at = float("-inf")
        if not self.contact:
            return
        self.contact = False
        if self.role is Role.STANDBY:
            self._become(Role.ACTIVE, out)
        self._look(out)

    def _note(self, told: Told, now: float, out: list[Action]) -> None:
        notes = self._notes_of(told.room, now)
        notes.theirs = told
        if notes.own is not None and notes.own.ids <= {*told.merged, *told.ids}:
            notes.own = None
        if self.serves:
            out.append(Feed(told.room, PartnerTold(told)))

    def _notes_of(self, room: str, now: float) -> _Notes:
        """Those of a room, which is one that lives: those that were written last are kept."""
        if self._full(room, now):
            del self._notes[next(iter(self._notes))]
            self.overrun, self._first_met = True, now
            self.partner = replace(self.partner, informed=False, since=now)
        notes = self._notes[room] = self._notes.pop(room, _Notes())
        return notes

    def _full(self, room: str, now: float) -> bool:
        """Whether there is no place for notes of that room, even if one that is over is forgotten."""
        return room not in self._notes and len(self._notes) >= MAX_NOTES and self._forget(now) is None

    def _forget(self, now: float, served: Container[str] = ()) -> Told | None:
        """Forget a room that is over, and not served. Returns what the other one is told of it; None: there is none."""
        over = (name for name, notes in self._notes.items() if name not in served and notes.over(self.partner, now))
        name = next(over, None)
        if name is None:
            return None
        known = self._notes.pop(name).told
        closed, finished = max((told.closed, told.finished) for told in known)
        merged = tuple(sorted({quorum_id for told in known for quorum_id in told.ids}))
        return Told(name, closed=closed, finished=finished, merged=merged)

    def _choose(self, report: Report, out: list[Action]) -> None:
        """Which of the two serves."""
        mine, theirs = self.role, report.role
        if theirs is Role.ACTIVE and (mine is not Role.ACTIVE or self._yields(report)):
            self._become(Role.STANDBY, out)
        elif theirs is not Role.ACTIVE and mine is not Role.ACTIVE and self.boot < report.boot:
            self._become(Role.ACTIVE, out)

    def _yields(self, report: Report) -> bool:
        return (report.leases, -report.boot) > (self._leases, -self.boot)

    def _become(self, role: Role, out: list[Action]) -> None:
        if role is self.role:
            return
        self.role = role
        if role is Role.ACTIVE:
            out.append(Serve())
        elif role is Role.STANDBY:
            out.append(StandBy())

    def _look(self, out: list[Action]) -> None:
        """Rooms are told what has become of the other one."""
        stands_by = self.contact and self._partner_role is Role.STANDBY
        if stands_by != self.partner.stands_by:
            self.partner = replace(self.partner, stands_by=stands_by)
        if self.serves:
            out.append(Feed("", PartnerIs(self.partner)))

    def _record(self, proposal: Proposal, now: float, leases: int) -> Send:
        """Record what is proposed, or refuse to."""
        known = self.known(proposal.room)
        accepted = self.role is Role.STANDBY and accepts(proposal, known, self.partner.met_at, now)
        accepted = accepted and not self._full(proposal.room, now)
        if accepted:
            notes = self._notes_of(proposal.room, now)
            before = notes.theirs
            notes.own = None
            notes.theirs = Told(
                proposal.room, proposal.quorum_id, proposal.members, bases=proposal.bases,
                furthest=proposal.furthest, closed=before.closed if before else "",
                finished=before.finished if before else Told("").finished, entered=proposal.entered,
                orphan_s=proposal.orphan_s,
            )  # fmt: skip
        return Send(replace(self.report(leases), answers=((proposal.quorum_id, accepted),)))


def accepts(proposal: Proposal, known: Sequence[Told], met_at: float, now: float) -> bool:
    """Whether a lighthouse that stands by records this: it knows of no quorum that it may contradict.

    Args:
        proposal: of the other lighthouse.
        known: what this one knows of the room.
        met_at: when the connection that stands now was opened; since then nobody has had a lease here.
        now: instant.
    """
    mine = {told.quorum_id for told in known if told.quorum_id and not told.ended}
    mine |= {newest(told.bases) for told in known} - {0}
    mine |= {basis.quorum_id for told in known for basis in told.elsewhere}
    if any(quorum_id not in proposal.over for quorum_id in mine):
        return False
    return not proposal.presumed or now >= met_at + proposal.orphan_s
