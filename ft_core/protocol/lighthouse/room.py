"""`Room`: one quorum namespace of a lighthouse, and the only mutator of what is known about it. Pure.

How it works. `Room.handle(event, now)` changes the records (`replica_table`), then `settle` draws all consequences:
leases that stay closed become losses, losses are announced to the quorum they belonged to, and
`quorum_rule.decide` is asked whether the next quorum may form. What the shell must do comes back as effects, in order;
`Room.next_at` is the instant at which to call `handle(Tick(), now)` if nothing happens before. There is no polling.

Invariants: those that stand beside the fields; `validate` checks them. Beside these: a replica is in the current quorum
only if it asked for it, or presented it after a restart (R9).

Ownership: one event loop (or the simulation) calls it; nothing here is thread safe. Nobody outside of
protocol/lighthouse writes a field of a room, its table or its records (tests/test_style.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse import events as ev
from ft_core.protocol.lighthouse.admission import Refusals, closed_by, too_late
from ft_core.protocol.lighthouse.build_backoff import BuildLog
from ft_core.protocol.lighthouse.claims import Claims
from ft_core.protocol.lighthouse.current_quorum import CurrentQuorum
from ft_core.protocol.lighthouse.deferred_reports import News
from ft_core.protocol.lighthouse.expected_groups import ExpectedGroups
from ft_core.protocol.lighthouse.explanation import Explanation
from ft_core.protocol.lighthouse.joining import Joining
from ft_core.protocol.lighthouse.lost_state import not_again
from ft_core.protocol.lighthouse.pushes import (
    departure,
    left_out,
    losses,
    pauses_of_members,
    pauses_to_member,
    pauses_to_peers,
    superseded,
)
from ft_core.protocol.lighthouse.quorum_rule import decide
from ft_core.protocol.lighthouse.reachability import Reachability
from ft_core.protocol.lighthouse.replica_table import ReplicaTable
from ft_core.protocol.lighthouse.room_view import of_pair, view_of
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.lighthouse.stalled import note_stalled
from ft_core.protocol.lighthouse.succession import Succession
from ft_core.protocol.lighthouse.unary_clients import keeps_id
from ft_core.protocol.lighthouse.view import Current, Formed, Life, NotReady, View
from ft_core.protocol.types import VOID, Member, Quorum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ft_core.protocol.lighthouse.partner import Told
    from ft_core.protocol.lighthouse.reachability import Holds
    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.quorum_ids import QuorumIds
    from ft_core.protocol.types import Ask, Version
    from ft_core.settings import LighthouseSettings


class Room:
    """One independent quorum namespace.

    Args:
        name: of the namespace.
        settings: of the lighthouse.
        ids: where quorum ids come from; shared by all rooms of the lighthouse.
        boot_at: when the lighthouse started, or forgot (R9). All instants are seconds of one clock.
        rules: in force; None: all. Only tests that show the need of one leave it out.
        holds: how long replicas that could not reach each other are kept apart; None: the usual times.
        closed: why nobody may join, and the state that a finished replica held, if the room was known before.
        told: what is known of the room from the other lighthouse of a pair (R22).
    """

    def __init__(
        self,
        name: str,
        settings: LighthouseSettings,
        ids: QuorumIds,
        *,
        boot_at: float,
        rules: Rules | None = None,
        holds: Holds | None = None,
        closed: tuple[str, Version] = ("", VOID),
        told: Sequence[Told] = (),
    ) -> None:
        self.name = name
        self.rules = rules or Rules()
        self.next_at: float | None = None
        """When to look again if nothing happens before."""
        self.waits = Explanation()
        self.closed, self.finished = closed
        self.expected = ExpectedGroups()
        self.reachability = Reachability(holds)
        self._settings = settings
        self._ids = ids
        self._boot_at = boot_at
        self._table = ReplicaTable(settings, boot_at)
        self._quorum = CurrentQuorum()
        self._refusals = Refusals()
        self._claims = Claims()
        self._news = News()
        """Knows whether anybody asks."""
        self._builds = BuildLog()
        self._joining = Joining()
        self._succession = Succession(name, ids, told)
        self._claims.furthest = self._succession.furthest
        self.unsettled = False
        """Something was taken whose consequences are not drawn yet: `settle` has to follow."""
        self._announce_again = False

    def __repr__(self) -> str:
        current = f"{self.current.quorum_id:#x} of {len(self.current.members)}" if self.current else "none"
        asking = sum(r.ask is not None for r in self.records.values())
        return f"Room({self.name!r}, quorum={current}, replicas={len(self.records)}, asking={asking})"

    @property
    def records(self) -> Mapping[str, Record]:
        """The record of each replica; to be looked at only."""
        return self._table.records

    def called(self, names: Iterable[str]) -> Mapping[str, Record]:
        """The records of these names or replica_ids, likewise."""
        return self._table.called(names)

    @property
    def current(self) -> Current | None:
        """The quorum in force."""
        return self._quorum.value

    @property
    def last_quorum(self) -> Quorum | None:
        """The last quorum formed under this boot, with its members' addresses."""
        return self._quorum.formed

    @property
    def presumed_over(self) -> int:
        """The last quorum that ended because all its connections closed before it reported a commit; 0: none."""
        return self._quorum.presumed_over

    def validate(self) -> None:
        """Raise AssertionError unless what the fields promise holds; tests call it after each event."""
        self._table.validate()
        self._quorum.validate(self._table, settled=not self.unsettled)
        assert self.current is None or self._ids.knows(self.current.quorum_id)
        self.waits.validate()
        asked_for = any(record.ask is not None for record in self.records.values())
        assert self.unsettled or self._news.asked_for == asked_for

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Apply one event and all that follows from it. Returns the effects to perform, in order."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[ev.Event], now: float) -> list[ev.Effect]:
        """Apply events that arrived together, then draw the consequences once (a decision looks at every replica)."""
        out = self.take(events, now)
        return out + self.settle(now) if self.unsettled else out

    def take(self, events: Iterable[ev.Event], now: float) -> list[ev.Effect]:
        """Apply events whose consequences `settle` draws later, with those of others: refusals come at once."""
        out: list[ev.Effect] = []
        for event in events:
            self.unsettled = self._apply(event, now, out) or self.unsettled
        return out

    def _apply(self, event: ev.Event, now: float, out: list[ev.Effect]) -> bool:
        """Change the records. False if nothing changed that a decision looks at."""
        match event:
            case ev.Hello():
                self._on_hello(event, now, out)
            case ev.LeaseEnded():
                broken = self._quorum.was_reported_failed(event.replica_id)
                out += self._table.lease_ended(event, now, broken=broken)
            case ev.Progress():
                return self._on_progress(event, now, out)
            case ev.Asked():
                self._on_asked(event, now, out)
            case ev.Incomplete():
                self._on_incomplete(event, now, out)
            case ev.Left():
                self._on_left(event, now, out)
            case ev.Ended():
                out += self._table.reported_ended(event.replica_id, now)
            case ev.GivenUp():
                out += self._table.reported_ended(event.name, now)
                out += self.expected.give_up(event.name, event.reason)
            case ev.Turbulence():
                out.append(self._table.turbulence(now))
            case ev.Reopen():
                self.closed = ""
            case ev.PartnerIs() | ev.PartnerTold() | ev.Recorded():
                self._succession.take(event, self.current)
                self._claims.furthest = max(self._claims.furthest, self._succession.furthest)
                self._inherit(now, out)
        return True

    def _on_hello(self, hello: ev.Hello, now: float, out: list[ev.Effect]) -> None:
        replica_id = hello.replica_id
        if self.current is not None and hello.members == self.current.members:
            hello = replace(hello, members=self.current.members)  # one list, not one of a thousand names per member
        strange = self._ids.take(**hello.ids)
        known = self.records.get(replica_id)
        same = known is not None and known.hello.incarnation == hello.incarnation
        if same and known is not None and hello.generation < known.generation:
            return  # an older stream of the same process, overtaken on its way here (R15)
        if self._refuse(
            replica_id, self._refusals.of_hello(hello, strange, self.records, self.closed, self.rules), out
        ):
            return
        if known is not None and known.is_other_process(hello) and replica_id in self._members:
            self._quorum.end(now)
        if known is not None and known.life is not Life.UP:
            self.reachability.returned(replica_id)
        record = self._table.hello(hello, self._members, now)
        if record is None:
            out.append(ev.Refuse(replica_id, f"room {self.name!r} is full ({len(self.records)} replicas)"))
            return
        self.expected.hello(hello)
        self._succession.presented(hello)
        self._inherit(now, out)
        self._claims.introduced(record, self._succession.theirs, self.rules)
        self._claims.reported(record, max(hello.version, hello.stable))
        if replica_id in self._members:  # what was pushed while it had no lease is lost; pushes are idempotent
            self._quorum.waiting = frozenset()
            self._announce_again = True
        self._present(hello, record, now, out)
        if self.rules.pauses_told:
            out += pauses_to_member(self.current, replica_id, self.records, now)
        if self._refuse(replica_id, self._refusals.of_sizes(hello, self.records, self._members), out):
            record.goes(now)  # it gets no lease whose end could be noticed
            return
        answer = record.answered[1].quorum_id if record.answered else 0
        if answer > hello.quorum_id and record.ask is None and not self._in_force(answer):
            # It may be about to enter a quorum whose whole life it slept through (its answer lay in a socket's buffer).
            out.append(ev.Superseded(replica_id, answer))

    def _ask_refused(self, ask: Ask, record: Record, out: list[ev.Effect]) -> bool:
        """Whether this ask is not taken."""
        strange = self._ids.take(quorum_id=ask.quorum_id, version_quorum_id=ask.version.quorum_id)
        refused = self._refusals.of_ask(ask, strange, self.records, record.hello.quorum_id, self._members, self.rules)
        return self._refuse(ask.replica_id, refused, out)

    def _refuse(self, replica_id: str, refused: Sequence[ev.Refuse], out: list[ev.Effect]) -> bool:
        """End the asks of those who are refused. True if `replica_id` is one of them."""
        for refusal in refused:
            if refusal.to in self.records:
                self.records[refusal.to].ask = None
        out += refused
        return any(refusal.to == replica_id for refusal in refused)

    def _present(self, hello: ev.Hello, record: Record, now: float, out: list[ev.Effect]) -> None:
        """Adopt the newest quorum that anybody presents; holders of older ones are superseded (R9)."""
        current = self.current
        if not hello.quorum_id or (current is not None and hello.quorum_id == current.quorum_id):
            return
        vouched = self._succession.vouched
        if current is None or self._claims.overrules(hello, record, self.records, current, self.rules, vouched):
            if hello.replica_id not in hello.members:
                return
            self._adopt(hello, hello.quorum_id, hello.members, now, out)
        elif record.ask is None and record.life is Life.UP:
            out.append(ev.Superseded(hello.replica_id, hello.quorum_id))

    def _adopt(
        self, hello: ev.Hello, quorum_id: int, members: tuple[str, ...], now: float, out: list[ev.Effect]
    ) -> None:
        ended = any(record.life is Life.GONE for record in self._table.named(members))
        self._succession.adopted(quorum_id, self.current, hello)
        self._quorum.adopt(quorum_id, members, now, ended=ended)
        self._refusals.forget_size()
        self._table.expect(members, hello, now)
        out.append(ev.Note(f"adopted the running quorum of {', '.join(members)} from {hello.replica_id}"))
        self._claims.adopted(members, self._succession.theirs, self.records, self.rules)
        out += superseded(quorum_id, self.records)

    def _inherit(self, now: float, out: list[ev.Effect]) -> None:
        """Take over the quorum that the other lighthouse has told of, once somebody is here (R22)."""
        for hello in next(([record.hello] for record in self.records.values() if record.life is Life.UP), []):
            for told in self._succession.inherits(self.current):
                self._adopt(hello, told.quorum_id, told.members, now, out)
        out += map(ev.Note, self._succession.forgotten.remark(self._succession.partner))

    def _on_progress(self, event: ev.Progress, now: float, out: list[ev.Effect]) -> bool:
        """False if nothing changed that a decision looks at (the common case, several times per second and replica)."""
        record = self._table.of_stream(event.replica_id, event.generation)
        if record is None:
            return False
        newer = record.reports(event, now)
        self._quorum.report_step(event.replica_id, event.step)
        self._joining.reported(self._quorum, event.replica_id, event.step, now)
        self.expected.holds(event.stable)
        self._claims.reported(record, event.stable, event.step)
        self._saw_commit(event.stable.quorum_id, record)
        changed = record.pauses(event.paused_s, now)
        if changed:
            out += pauses_to_peers(self.current, event.replica_id, self.records, now)
        if newer:
            self.next_at = self._news.look_at(now, self.next_at)
        return changed or (newer and not self.rules.lazy_news)

    def _on_asked(self, event: ev.Asked, now: float, out: list[ev.Effect]) -> None:
        ask = event.ask
        record = self._table.of_lease(ask.replica_id, event.generation)
        if record is None or self._ask_refused(ask, record, out):
            return
        record.brings(ask)
        if record.answered and record.answered[0] == ask.seq and self._in_force(record.answered[1].quorum_id):
            out.append(ev.Announce(record.answered[1], ((ask.replica_id, ask.seq),)))
            return
        if self.closed and ask.version.step < self.finished.step:
            out.append(ev.Refuse(ask.replica_id, self.closed, finished=True))
            return
        self._claims.reported(record, ask.version)
        record.asks(ask, now)
        self.expected.holds(ask.version)
        self._saw_commit(ask.version.quorum_id, record)
        out += map(ev.Note, self.reachability.stated(ask, self._table.living(ask.unreachable), now))
        left = self._quorum.is_left_by(ask, record.answered)
        self._succession.asked(ask, record.members_of(ask.quorum_id), leaves=left)
        if self.current is not None and left:
            self._quorum.end(now)
            first = self._quorum.report_left(ask)
            out += departure(ask, self.current, self.records, self._table.leaseless, first=first)

    def _on_incomplete(self, event: ev.Incomplete, now: float, out: list[ev.Effect]) -> None:
        """A group lacks a rank: what it was in has ended for it, whatever it is in."""
        record = self._table.of_lease(event.replica_id, event.generation)
        if record is None or not self.rules.r12_incomplete:
            return
        record.incomplete = event.reason
        out.append(ev.Note(event.reason))
        if event.replica_id in self._members:
            self._quorum.end(now)

    def _on_left(self, event: ev.Left, now: float, out: list[ev.Effect]) -> None:
        record = self._table.of_stream(event.replica_id, event.generation)
        if record is None:
            return
        record.leaves(event, now)
        out.append(ev.Note(f"{event.replica_id} left: {event.reason}"))
        self._claims.ended(record, self.records, over=event.over and not self._settings.one_job)
        settled = self._claims.settled(self.records, self.current, self.rules)
        if event.finished and settled and not record.proven:
            out.append(ev.Note(f"{event.replica_id} was in no quorum of this room: that it has finished ends nothing"))
        elif event.finished:
            self.finished = event.version
            self.closed = closed_by(self.name, event)
            out += too_late(self.records, self.closed, event.version)

    def settle(self, now: float) -> list[ev.Effect]:
        """Draw every consequence of the records as they are at `now`, and set `next_at`."""
        out, times = self._table.age(self._members, now, self.rules, alone=not self._succession.partner.address)
        self.unsettled = False
        members = self._table.named(self._members)
        self._quorum.end_if_over(members, now, self.rules)
        if self._announce_again:  # a member has a lease again, and may not have received what was announced
            self._table.announce_losses_again(members)
            self._announce_again = False
        out += losses(self.current, self.records, lambda record: self._table.suspected(record, now))
        if any(record.ask is not None for record in self.records.values()):
            times += self._decide(now, out)
        else:
            self.waits.over()
        times += (self.reachability.next_at(now), *self._news.seen(self.records.values()))
        self.next_at = min((t for t in times if t > now), default=None)
        return out

    def _decide(self, now: float, out: list[ev.Effect]) -> list[float]:
        """Somebody asks: form the next quorum, or explain why not yet. Returns when to look again."""
        view = self._view(now)
        notes, times = note_stalled(view, self.records)
        out += notes
        outcome = decide(view)
        if isinstance(outcome, Formed) and self.rules.r15_unbuilt:
            blamed = self._builds.hold_back(self.last_quorum, outcome.asks, self.records, now)
            view = self._view(now) if blamed else view
            outcome = decide(view) if blamed else outcome
            out += map(ev.Note, blamed)
        if isinstance(outcome, Formed) or outcome.void:
            outcome, lost = self._succession.certain(*not_again(outcome, view, self._claims.furthest), view)
            self._refuse("", lost, out)
        if isinstance(outcome, Formed):
            presumed = self._quorum.is_presumed_over
            outcome, proposed = self._succession.grown(outcome, view, self.records, self._claims.furthest, presumed)
            out += proposed
        if isinstance(outcome, Formed):
            self._form(outcome, now, out)
            self.waits.over()
            if any(record.ask is not None for record in self.records.values()):  # who was held back asks still
                outcome = decide(self._view(now))
        held: Mapping[str, str] = {}
        if isinstance(outcome, NotReady):
            out += self.waits.tell(outcome, self.records, now)
            held, times = outcome.held, times if outcome.at is None else [*times, outcome.at]
        pending, at = self._joining.tell(self._quorum, self.records, held, now, self.rules)
        out += pending
        return times if at is None else [*times, at]

    @property
    def told(self) -> Told:
        """What the other lighthouse of a pair has to know of this room to go on in this one's place (R22)."""
        presumed, furthest = self._quorum.is_presumed_over, self._claims.furthest
        return self._succession.tells(self.current, furthest, self.closed, self.finished, presumed=presumed)

    def _form(self, formed: Formed, now: float, out: list[ev.Effect]) -> None:
        before, last = self._quorum.members, self.last_quorum
        same = last is not None and keeps_id(last, self.current, formed.asks, self.records)
        quorum_id = last.quorum_id if same and last is not None else formed.quorum_id or self._ids.next()
        after = self._succession.bases if self._succession.partner.address else ()
        quorum = Quorum(quorum_id, tuple(Member.of(ask) for ask in formed.asks), int(now * 1000), after)
        self._quorum.form(quorum)
        self._succession.formed(quorum)
        doubted = self._claims.joined(formed.asks, self.records)
        for ask in formed.asks:
            self.records[ask.replica_id].enters(ask.seq, quorum)
        self.reachability.formed(quorum.ids)
        out.append(ev.Announce(quorum, tuple((ask.replica_id, ask.seq) for ask in formed.asks)))
        if self.rules.pauses_told:
            out += pauses_of_members(self.current, self.records, now)
        out += map(ev.Note, (ev.formed_note(quorum, before), *doubted))
        out += left_out(formed, self.records)

    @property
    def _members(self) -> frozenset[str]:
        """The members of the current quorum; empty: there is none."""
        return self._quorum.among

    def _in_force(self, quorum_id: int) -> bool:
        """An answer is repeated only while it is true: whoever slept through a whole quorum must not enter it (R14)."""
        return not self.rules.r14_in_force or self._quorum.is_in_force(quorum_id)

    def _saw_commit(self, quorum_id: int, reporter: Record) -> None:
        """A step was committed in that quorum: every member of it has got past its first commit (R15).

        A peer's report counts, because the dead send none, and it may come after a death was counted as a crash.
        """
        current = self.current
        if current is None or quorum_id != current.quorum_id or self._news.known(quorum_id, reporter):
            return
        self._succession.committed(current)
        if not self._quorum.trained:  # not on later ones: a link may have been cut since
            self.reachability.committed(current.members)
        self._quorum.trained = True
        self._table.committed(current.members)
        self._builds.forgive(self._table.named(current.members))

    def _view(self, now: float) -> View:
        view = view_of(self.records, self.current, self.expected, self._settings, self._claims, self.rules, now)
        view = replace(of_pair(view, self._succession), cut=self.reachability.cut(now, self.rules))
        return replace(view, boot_until=self._table.boot_until, restart_until=self._boot_at + view.orphan_s)
