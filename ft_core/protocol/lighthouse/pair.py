"""`Pair`: one of two lighthouses that share a job: which of them serves, and what each tells the other (R22). Pure.

How it works. Each sends the other reports: who it is, what it does, whom it hears, and what it knows of each room. They
are in *contact* while each hears the other. In contact one of them serves (`ACTIVE`) and the other stands by: it takes
no lease and no ask, it writes down what it is told and records what is proposed to it. One that stands by serves as
soon as the contact is lost. So out of contact both may serve; what keeps them from forming two quorums beside each
other is `succession`, not this.

When contact is made, a complete report goes each way before anything else. If both serve then, the one with fewer
leases stands by; if neither does, the one of the lower number serves. One that has just started waits START_S for the
other before it serves.

Invariants: one that stands by never accepts a proposal about a room in which it knows of a quorum that the proposer
does not (`accepts`). What this one knew is kept until the other has taken it into account. At most MAX_ROOMS
rooms are written down. Ownership: one event loop (or the simulation) calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import PartnerIs, PartnerTold, Recorded
from ft_core.protocol.lighthouse.partner import Partner, Proposal, Told, newest
from ft_core.protocol.lighthouse.room_keeping import MAX_ROOMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.protocol.lighthouse.events import Event

START_S = 1.0
"""After its start a lighthouse waits for the other one for so long before it serves (seconds)."""
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

    @property
    def over(self) -> bool:
        """Nothing of it goes on, as far as is known."""
        return all(t is None or t.closed or t.ended or not t.ids for t in (self.own, self.theirs))


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
        notes = self._notes.get(room, _Notes())
        return tuple(told for told in (notes.own, notes.theirs) if told is not None)

    def all_known(self) -> list[Told]:
        """What is written down about all rooms: what one that stands by, or has just started, reports."""
        return [told for notes in self._notes.values() for told in (notes.own, notes.theirs) if told is not None]

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
        for told in report.told:
            self._note(told, out)
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
        if report.complete:
            self.partner = replace(self.partner, informed=True)
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

    def stops(self, room: Told) -> None:
        """It stops serving: what a room knows is kept until the other one has taken it into account."""
        self._notes_of(room.room).own = room

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

    def _note(self, told: Told, out: list[Action]) -> None:
        notes = self._notes_of(told.room)
        notes.theirs = told
        if notes.own is not None and notes.own.ids <= {*told.merged, *told.ids}:
            notes.own = None
        if self.serves:
            out.append(Feed(told.room, PartnerTold(told)))

    def _notes_of(self, room: str) -> _Notes:
        """Those of a room, which is one that lives: those that were written last are kept."""
        notes = self._notes[room] = self._notes.pop(room, _Notes())
        while len(self._notes) > MAX_ROOMS:  # rooms that are over go first
            over = (name for name, kept in self._notes.items() if kept is not notes and kept.over)
            del self._notes[next(over, next(iter(self._notes)))]
        return notes

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
        if accepted:
            notes = self._notes_of(proposal.room)
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
