"""The lighthouse's memory of one room, and its only mutator. Pure: `(state, event, now) -> effects`, no clock, no I/O.

How it works. `Room.handle(event, now)` changes the records, then `_settle` draws every consequence that follows: leases
that stay closed become losses (`absence`), losses are announced to the quorum they belonged to, and
`quorum_rule.decide` is asked whether the next quorum may form. What the shell must do comes back as effects, in order;
`Room.next_at` is the instant at which to call `handle(Tick(), now)` if nothing happens before. There is no polling.

Invariants:
- one quorum_id names one member list; ids only grow (`ids.next`);
- a replica is in `_current` only if it asked for it, or presented it after a restart;
- only the newest stream of a replica (its `generation`) can change its life (R15);
- every map is bounded: records by `MAX_RECORDS`, answers by the records that hold them.

Ownership: one event loop (or the simulation) calls it; nothing here is thread safe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.absence import (
    Absences,
    Circumstances,
    became,
    forgotten,
    least_needed,
    presume_over,
)
from ft_core.protocol.lighthouse.admission import (
    Refusals,
    closed_by,
    earlier_process,
    of_sizes,
    same_name,
    too_late,
)
from ft_core.protocol.lighthouse.build_backoff import BuildLog
from ft_core.protocol.lighthouse.claims import Claims
from ft_core.protocol.lighthouse.crash_backoff import CrashLog
from ft_core.protocol.lighthouse.deferred_reports import News
from ft_core.protocol.lighthouse.events import (
    Announce,
    Asked,
    Effect,
    Ended,
    Event,
    Explain,
    GivenUp,
    Hello,
    Incomplete,
    LeaseEnded,
    Left,
    Note,
    Progress,
    Refuse,
    Reopen,
    Superseded,
    Tick,
    Turbulence,
    formed_note,
)
from ft_core.protocol.lighthouse.expected_groups import ExpectedGroups
from ft_core.protocol.lighthouse.lost_state import not_again
from ft_core.protocol.lighthouse.pushes import (
    change_pending,
    failure,
    joiners,
    losses,
    pauses_to_member,
    pauses_to_peers,
    superseded,
)
from ft_core.protocol.lighthouse.quorum_rule import decide, due
from ft_core.protocol.lighthouse.reachability import Reachability
from ft_core.protocol.lighthouse.reasons import late
from ft_core.protocol.lighthouse.record import Record
from ft_core.protocol.lighthouse.room_view import view_of
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.lighthouse.unary_clients import keeps_id
from ft_core.protocol.lighthouse.view import Current, Formed, Life, NotReady, View
from ft_core.protocol.pauses import differs
from ft_core.protocol.types import UNTRAINED, VOID, Ask, Member, Quorum
from ft_core.settings import MAX_REPLICAS, LighthouseSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ft_core.protocol.quorum_ids import QuorumIds

MAX_RECORDS = 4 * MAX_REPLICAS
TWIN_LIVENESS = 1.5
"""Liveness timeouts after which an earlier process of a newcomer's name is known to live, if it has not gone silent."""
WORD_GRACES = 5
"""Graces for which a supervisor's word about a name is remembered while the lease of that process still stands."""


class Room:
    """One independent quorum namespace."""

    def __init__(self, name: str, settings: LighthouseSettings, ids: QuorumIds, *, boot_at: float) -> None:
        self.name = name
        self.rules = Rules()
        self.records: dict[str, Record] = {}
        self.next_at: float | None = None
        self.reason: str = ""
        self.held: Mapping[str, str] = {}
        """Who asks and is held back: each is told its own reason."""
        self.paused_until = 0.0
        """While there is a `reason`: until when those that are waited for may be busy; 0: nobody is."""
        self.closed: str = ""
        self.finished = VOID
        """What a finished replica held when it closed the room: nobody trains towards it again (R16)."""
        self._settings = settings
        self._ids = ids
        self._current: Current | None = None
        self._boot_at = boot_at
        self._boot_until = boot_at + settings.boot_window_s
        self._absences = Absences(settings, boot_at)
        self._trained = False
        """A commit made in the current quorum was reported, or may have been: it was adopted."""
        self.presumed_over = 0
        """The last quorum that was taken as ended because all its connections closed before it reported a commit."""
        self._refusals = Refusals()
        self._claims = Claims()
        self._failed = 0
        """The quorum that a member last reported as broken."""
        self._pending: frozenset[str] = frozenset()
        """Who was waiting when change-pending was last pushed for the current quorum: pushed once per set."""
        self._news = News()
        self._crashes = CrashLog()
        self._builds = BuildLog()
        self.expected = ExpectedGroups()
        self.reachability = Reachability()
        self._last_quorum: Quorum | None = None

    def __repr__(self) -> str:
        current = f"{self._current.quorum_id:#x} of {len(self._current.members)}" if self._current else "none"
        asking = sum(r.ask is not None for r in self.records.values())
        return f"Room({self.name!r}, quorum={current}, replicas={len(self.records)}, asking={asking})"

    @property
    def current(self) -> Current | None:
        """The quorum in force."""
        return self._current

    @property
    def last_quorum(self) -> Quorum | None:
        """The last quorum formed under this boot, with its members' addresses."""
        return self._last_quorum

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and everything that follows from it. Returns the effects to perform, in order."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Effect]:
        """Apply events that arrived together, then draw the consequences once (a decision looks at every replica)."""
        out: list[Effect] = []
        settle = False
        for event in events:
            settle = self._apply(event, now, out) or settle
        if settle:
            self._settle(now, out)
        return out

    def _apply(self, event: Event, now: float, out: list[Effect]) -> bool:
        """Change the records. False if nothing changed that a decision looks at."""
        match event:
            case Hello():
                self._on_hello(event, now, out)
            case LeaseEnded():
                self._on_lease_ended(event, now, out)
            case Progress():
                return self._on_progress(event, now, out)
            case Asked():
                self._on_asked(event, now, out)
            case Incomplete():
                self._on_incomplete(event, now, out)
            case Left():
                self._on_left(event, now, out)
            case Ended() | GivenUp():
                self._on_supervisor(event, now, out)
            case Turbulence():
                self._on_turbulence(now, out)
            case Reopen():
                self.closed = ""
            case Tick():
                pass
        return True

    # ------------------------------------------------------------ events

    def _on_hello(self, hello: Hello, now: float, out: list[Effect]) -> None:
        strange = self._ids.take(quorum_id=hello.quorum_id, highest_id=hello.highest_id, epoch=hello.version.epoch)
        record = self.records.get(hello.replica_id)
        same = record is not None and record.hello.incarnation == hello.incarnation
        if same and record is not None and hello.generation < record.generation:
            return  # an older stream of the same process, overtaken on its way here (R15)
        if self._refused(hello, strange, out):
            return
        if record is None:
            if len(self.records) >= MAX_RECORDS and not self._evict():
                out.append(Refuse(hello.replica_id, f"room {self.name!r} is full ({MAX_RECORDS} replicas)"))
                return
            record = Record(hello, Life.UP, now, hello.stable, hello.generation)
            record.admitted_at = self._crashes.not_before(hello.name, now)
            if earlier_process(hello, self.records):
                record.twin_until = now + TWIN_LIVENESS * hello.liveness_s
                record.admitted_at = max(record.admitted_at, record.twin_until)
            self.records[hello.replica_id] = record
        else:
            if record.generation >= 0 and record.hello.incarnation != hello.incarnation:
                # Another process under the same id; its predecessor closed its connection: nothing is left of that one.
                record.succeeded()
                if self._current is not None and hello.replica_id in self._current.members:
                    self._end_current(now)
            record.hello, record.generation = hello, hello.generation
            record.stable = max(record.stable, hello.stable)
            if record.life is not Life.UP:
                self._on_return(record, now)
        self.expected.hello(hello)
        record.pauses(hello.paused_s, now)
        record.accused = record.told_lost = record.agreed = False
        record.word_until, record.incomplete = 0.0, ""  # if a rank is still missing, it is reported once more
        self._claims.reported(record, max(hello.version, hello.stable))
        self._push_again(hello.replica_id)
        self._present(hello, record, now, out)
        if self.rules.pauses_told:
            out += pauses_to_member(self._current, hello.replica_id, self.records, now)
        if not hello.unary and self._refuse_sizes(hello.replica_id, hello.group_world_size, out):
            record.goes(now)  # it gets no lease whose end could tell
            return
        answer = record.answered[1].quorum_id if record.answered else 0
        if answer > hello.quorum_id and record.ask is None and not self._in_force(answer):
            # It may be about to enter a quorum whose whole life it slept through (its answer lay in a socket's buffer).
            out.append(Superseded(hello.replica_id, answer))

    def _on_return(self, record: Record, now: float) -> None:
        """A replica without a lease has one again."""
        current = self._current
        if current is not None and record.hello.replica_id in current.members and record.life is not Life.UNKNOWN:
            self._absences.returned(record, now)
        self._crashes.returned(record)
        self.reachability.returned(record.hello.replica_id)
        record.life, record.since, record.presumed_dead = Life.UP, now, False

    def _push_again(self, replica_id: str) -> None:
        """What was pushed while a member had no lease is lost: have it pushed once more (pushes are idempotent)."""
        current = self._current
        if current is None or replica_id not in current.members:
            return
        self._pending = frozenset()
        for member in current.members:
            record = self.records.get(member)
            if record is not None and not record.agreed:
                record.told_lost = False

    def _refused(self, hello: Hello, strange: str, out: list[Effect]) -> bool:
        """Whether this replica is not taken at all. `strange`: what is wrong with the ids it names."""
        refusal = self._refusals.of_hello(hello, self.records, self.closed)
        refusal = Refuse(hello.replica_id, strange) if strange else refusal
        if refusal:
            out.append(refusal)
            return True
        other_models = self._refusals.of_layout(hello, self.records, hello.quorum_id, self.rules)
        return self._refuse(hello.replica_id, other_models, out)

    def _ask_refused(self, ask: Ask, record: Record, out: list[Effect]) -> bool:
        """Whether this ask is not taken."""
        strange = self._ids.take(quorum_id=ask.quorum_id, epoch=ask.version.epoch)
        refused = [Refuse(ask.replica_id, strange)] if strange else []
        refused = refused or self._refusals.of_layout(ask, self.records, record.hello.quorum_id, self.rules)
        return self._refuse(ask.replica_id, refused, out) or self._refuse_sizes(
            ask.replica_id, ask.group_world_size, out
        )

    def _refuse_sizes(self, replica_id: str, size: int, out: list[Effect]) -> bool:
        """Refuse who has a group of another size. True if that is `replica_id` itself."""
        members = self._current.members if self._current else ()
        return self._refuse(replica_id, of_sizes(replica_id, size, self.records, members), out)

    def _refuse(self, replica_id: str, refused: Sequence[Refuse], out: list[Effect]) -> bool:
        """End the asks of those who are refused. True if `replica_id` is one of them."""
        for refusal in refused:
            if refusal.to in self.records:
                self.records[refusal.to].ask = None
        out += refused
        return any(refusal.to == replica_id for refusal in refused)

    def _present(self, hello: Hello, record: Record, now: float, out: list[Effect]) -> None:
        """R9: adopt the newest quorum anybody presents; tell holders of older ones that they are over."""
        if not hello.quorum_id:
            return
        current = self._current
        if current is not None and hello.quorum_id == current.quorum_id:
            return
        if current is None or self._claims.overrules(hello, record, self.records, current, self.rules):
            if hello.replica_id not in hello.members:
                return
            ended = any(self.records[i].life is Life.GONE for i in hello.members if i in self.records)
            self._current = Current(hello.quorum_id, hello.members, ended, now)
            self._trained = True
            self._pending = frozenset()
            for replica_id in hello.members:
                if replica_id not in self.records and len(self.records) < MAX_RECORDS:
                    self.records[replica_id] = Record.unseen(replica_id, hello, now)
            out.append(Note(f"adopted the running quorum of {', '.join(hello.members)} from {hello.replica_id}"))
            self._claims.adopted(hello.members, self.records)
            out += superseded(hello.quorum_id, self.records)
        elif record.ask is None and record.life is Life.UP:
            out.append(Superseded(hello.replica_id, hello.quorum_id))

    def _on_lease_ended(self, event: LeaseEnded, now: float, out: list[Effect]) -> None:
        record = self.records.get(event.replica_id)
        if record is None or record.generation != event.generation or record.life is not Life.UP:
            return
        # Keepalives go unanswered for a whole liveness timeout before they end a lease. A lease that ends sooner after
        # its last message was closed: by the kernel of a process that is gone, or by something in between.
        closed = event.silence_s < 0.75 * record.hello.liveness_s
        if now < record.word_until:
            self._end(event.replica_id, record, now, out)
            return
        record.life, record.since = (Life.CLOSED if closed else Life.MISSED), now
        # Whose collectives failed may have said so before this stream ended: it is the second witness all the same.
        current = self._current
        member = current is not None and event.replica_id in current.members and self._failed == current.quorum_id
        record.accused, record.ask = member and record.ask is None, None
        if not closed:  # what a closed connection amounts to is noted when it is known (`_age`)
            out.append(Note(f"{event.replica_id} went silent (frozen or cut off)"))

    def _on_progress(self, event: Progress, now: float, out: list[Effect]) -> bool:
        """False if nothing changed that a decision looks at (the common case, several times per second and replica)."""
        record = self.records.get(event.replica_id)
        if record is None or record.generation != event.generation:
            return False
        record.step, record.phase = event.step, event.phase
        self._note_training(event.replica_id, event.step)
        newer = event.stable > record.stable
        record.stable = max(record.stable, event.stable)
        self.expected.holds(event.stable)
        self._claims.reported(record, event.stable, event.step)
        self._saw_commit(event.stable.epoch, record)
        if event.heal_addresses and event.heal_addresses != record.hello.heal_addresses:
            record.hello = replace(record.hello, heal_addresses=event.heal_addresses)
        if event.paused_s > 0:
            record.stalled = ""
        changed = record.pauses(event.paused_s, now)
        if changed:
            out += pauses_to_peers(self._current, event.replica_id, self.records, now)
        if newer:
            self.next_at = self._news.look_at(now, self.next_at)
        return changed or (newer and not self.rules.lazy_news)

    def _on_asked(self, event: Asked, now: float, out: list[Effect]) -> None:
        ask = event.ask
        record = self.records.get(ask.replica_id)
        if record is None or record.generation != event.generation or record.life is not Life.UP:
            return
        if self._ask_refused(ask, record, out):
            return
        if (record.hello.group_world_size, record.hello.min_replicas) != (ask.group_world_size, ask.min_replicas):
            record.hello = replace(
                record.hello, group_world_size=ask.group_world_size, min_replicas=ask.min_replicas
            )  # fmt: skip
        if ask.layout_lines:
            record.hello = replace(record.hello, layout=ask.layout, layout_lines=ask.layout_lines)
        if record.answered and record.answered[0] == ask.seq and self._in_force(record.answered[1].quorum_id):
            out.append(Announce(record.answered[1], ((ask.replica_id, ask.seq),)))
            return
        if self.closed and ask.version.step < self.finished.step:
            out.append(Refuse(ask.replica_id, self.closed, finished=True))
            return
        if record.ask is None:
            record.asked_at = now
        record.ask, record.stalled, record.incomplete = ask, "", ""
        self._claims.reported(record, ask.version)
        record.step = max(ask.version.step, 0)
        record.stable = max(record.stable, ask.stable)
        self.expected.holds(ask.version)
        self._saw_commit(ask.version.epoch, record)
        up = tuple(i for i in ask.unreachable if (r := self.records.get(i)) is not None and r.life is Life.UP)
        out += [Note(text) for text in self.reachability.stated(ask, up, now)]
        current = self._current
        answered = record.answered
        # It asked again without having taken the answer that put it into the current quorum (its caller timed out).
        passed = answered is not None and current is not None and answered[1].quorum_id == current.quorum_id
        passed = passed and answered is not None and ask.seq > answered[0]
        if current and ask.replica_id in current.members and (ask.quorum_id >= current.quorum_id or passed):
            self._end_current(now)
            if ask.failed:
                first, self._failed = self._failed != current.quorum_id, current.quorum_id
                out += failure(ask, current, self.records, first=first)

    def _on_incomplete(self, event: Incomplete, now: float, out: list[Effect]) -> None:
        """A group lacks a rank: what it was in has ended for it, whatever it is in."""
        record = self.records.get(event.replica_id)
        if record is None or record.generation != event.generation or record.life is not Life.UP:
            return
        if not self.rules.r12_incomplete:
            return
        record.incomplete = event.reason
        out.append(Note(event.reason))
        if self._current is not None and event.replica_id in self._current.members:
            self._end_current(now)

    def _on_left(self, event: Left, now: float, out: list[Effect]) -> None:
        record = self.records.get(event.replica_id)
        if record is None or record.generation != event.generation:
            return
        # With an open ask it leaves a quorum that has ended without it: nobody waits there for its collectives.
        record.told_lost = record.agreed = event.agreed or (record.ask is not None and not record.ask.failed)
        record.goes(now)
        # A generation of -1: nothing that is still under way on this stream brings it back.
        record.stable, record.left_with, record.generation = VOID, event.version, -1
        out.append(Note(f"{event.replica_id} left: {event.reason}"))
        self._claims.ended(record, self.records, over=event.over and not self._settings.one_job)
        settled = self._claims.settled(self.records, self._current, self.rules)
        if event.finished and settled and not record.proven:
            out.append(Note(f"{event.replica_id} was in no quorum of this room: that it has finished ends nothing"))
        elif event.finished:
            self.finished = event.version
            self.closed = closed_by(self.name, event)
            out += too_late(self.records, self.closed, event.version)

    def _on_supervisor(self, event: Ended | GivenUp, now: float, out: list[Effect]) -> None:
        self._on_ended(event if isinstance(event, Ended) else Ended(event.name), now, out)
        if isinstance(event, GivenUp) and self.expected.give_up(event.name, event.reason):
            out.append(Note(f"{event.name} is not started again, reports its supervisor: {event.reason}"))

    def _on_ended(self, event: Ended, now: float, out: list[Effect]) -> None:
        named = {i: r for i, r in self.records.items() if event.replica_id in (i, r.hello.name)}
        # A name's word can arrive after its next incarnation, whose lease then stands: it is not the one meant. But the
        # word can also be faster than the end of the lease that it is about.
        slow = any(r.life not in (Life.UP, Life.GONE) for r in named.values())
        for replica_id, record in named.items():
            if record.life is Life.UP and event.replica_id != replica_id:
                if not slow and not record.twin_until:
                    record.word_until = now + WORD_GRACES * self._settings.grace_s
            elif record.life is not Life.GONE:
                self._end(replica_id, record, now, out)

    def _end(self, replica_id: str, record: Record, now: float, out: list[Effect]) -> None:
        """A supervisor saw this process end."""
        record.goes(now)
        self._crashes.died(record, now)
        out.append(Note(f"{replica_id} ended, says its supervisor"))

    def _on_turbulence(self, now: float, out: list[Effect]) -> None:
        self._boot_until = max(self._boot_until, now + self._settings.boot_window_s)
        self._absences.turbulent_until = self._boot_until
        out.append(Note("most connections dropped together: waiting for them to come back before believing any death"))

    # ------------------------------------------------------------ consequences

    def _settle(self, now: float, out: list[Effect]) -> None:
        """Draw every consequence of the records as they are at `now`, and set `next_at`."""
        times: list[float] = []
        self._age(now, times, out)
        out += losses(self._current, self.records, lambda record: self._absences.suspected(record, now))
        view = self._view(now)
        self._note_stalled(view, times, out)
        outcome = decide(view)
        if isinstance(outcome, Formed) and self.rules.r15_unbuilt:
            notes = self._builds.hold_back(self._last_quorum, outcome.asks, self.records, now)
            outcome = decide(self._view(now)) if notes else outcome
            out += map(Note, notes)
        if isinstance(outcome, Formed) or outcome.void:
            outcome, lost = not_again(outcome, self._view(now), self._claims.furthest)
            self._refuse("", lost, out)
        if isinstance(outcome, Formed):
            self._form(outcome, now, out)
            self.reason, self.paused_until, self.held = "", 0.0, {}
            outcome = decide(self._view(now))
        if isinstance(outcome, NotReady):
            self._explain(outcome, now, out)
            if outcome.at is not None:
                times.append(outcome.at)
        self._push_pending(outcome.held if isinstance(outcome, NotReady) else {}, out)
        times += (self.reachability.next_at(now), *self._news.seen(self.records.values()))
        self.next_at = min((t for t in times if t > now), default=None)

    def _age(self, now: float, times: list[float], out: list[Effect]) -> None:
        """Draw what follows from leases that are closed, unknown or silent for long enough."""
        members = self._current.members if self._current else ()
        closed = sum(r.life is not Life.UP for i in members if (r := self.records.get(i)) is not None)
        for replica_id, record in list(self.records.items()):
            if record.twin_until and not self._keep_twin(record, now, times, out):
                continue
            harmless = replica_id not in members and record.stable <= UNTRAINED
            around = Circumstances(harmless, 2 * closed > len(members), self._boot_until, self.rules)
            life, looks = self._absences.look(record, now, around)
            times.extend(looks)
            if life is not record.life:
                self._turn(replica_id, record, life, now, out)
            if replica_id not in members:
                if forgotten(record, now):
                    del self.records[replica_id]
            elif record.life is Life.GONE:
                self._end_current(now)
        self._presume_over(now)

    def _turn(self, replica_id: str, record: Record, life: Life, now: float, out: list[Effect]) -> None:
        """Time has told what became of a replica."""
        was = record.life
        record.turns(life, now)
        if was is Life.CLOSED:
            self._crashes.died(record, now)
        out += map(Note, became(replica_id, record, was))

    def _presume_over(self, now: float) -> None:
        current = self._current
        if current is None or current.ended or self._trained or not self.rules.r1_closed:
            return
        if presume_over([r for i in current.members if (r := self.records.get(i)) is not None]):
            self.presumed_over = current.quorum_id
            self._end_current(now)

    def _note_training(self, replica_id: str, step: int) -> None:
        """A member reported a step: is it one that was committed in the current quorum?"""
        quorum = self._last_quorum
        if not self._trained and quorum is not None and self._current is not None:
            same = quorum.quorum_id == self._current.quorum_id and replica_id in self._current.members
            self._trained = same and step > max(0, *(m.version.step for m in quorum.members))

    def _keep_twin(self, record: Record, now: float, times: list[float], out: list[Effect]) -> bool:
        """A newcomer waits until the earlier process of its name is gone or silent. False: it is refused."""
        hello = record.hello
        twin = earlier_process(hello, self.records)
        if not twin:
            record.twin_until, record.admitted_at = 0.0, self._crashes.not_before(hello.name, now)
            return True
        if now < record.twin_until:
            times.append(record.twin_until)
            return True
        del self.records[hello.replica_id]
        out.append(same_name(twin, hello))
        return False

    def _note_stalled(self, view: View, times: list[float], out: list[Effect]) -> None:
        """Who of the quorum that has ended lives, and is late for the next: said once, known until it asks."""
        for replica_id, at in due(view).items():
            record = self.records[replica_id]
            if view.now < at:
                times.append(at)
            elif not record.stalled:
                record.stalled = late(view, view.seen[replica_id])
                out.append(Note(record.stalled))

    def _form(self, formed: Formed, now: float, out: list[Effect]) -> None:
        before = self._current.members if self._current else ()
        same = keeps_id(self._last_quorum, self._current, formed.asks, self.records)
        quorum_id = self._last_quorum.quorum_id if same and self._last_quorum else self._ids.next()
        quorum = Quorum(quorum_id, tuple(Member.of(ask) for ask in formed.asks), int(now * 1000))
        self._current = Current(quorum_id, quorum.ids, ended=False)
        self._last_quorum = quorum
        self._pending = frozenset()
        doubted = self._claims.joined(formed.asks, self.records)
        for ask in formed.asks:
            record = self.records[ask.replica_id]
            record.ask, record.answered = None, (ask.seq, quorum)
            record.hello = replace(record.hello, quorum_id=quorum_id, members=quorum.ids)
            record.told_lost = record.accused = record.pause_told = False
            record.left_with = VOID
        self._trained = False
        self.reachability.formed(quorum.ids)
        out.append(Announce(quorum, tuple((ask.replica_id, ask.seq) for ask in formed.asks)))
        for ask in formed.asks if self.rules.pauses_told else ():
            if self.records[ask.replica_id].paused_until > now:  # it asked from inside a step, and validates now
                out += pauses_to_peers(self._current, ask.replica_id, self.records, now)
        out.append(Note(formed_note(quorum, before)))
        out += map(Note, doubted)
        for replica_id, why in formed.left_out.items():
            if not self.records[replica_id].stalled:
                out.append(Note(why))
            out.append(Superseded(replica_id, self.records[replica_id].hello.quorum_id))

    def _explain(self, outcome: NotReady, now: float, out: list[Effect]) -> None:
        asking = tuple(sorted(i for i, r in self.records.items() if r.ask is not None))
        same = outcome.reason == self.reason and not differs(outcome.paused_until, self.paused_until)
        if not asking or (same and outcome.held == self.held):
            return
        self.reason, self.paused_until, self.held = outcome.reason, outcome.paused_until, outcome.held
        out.append(Explain(asking, outcome.reason, max(0.0, outcome.paused_until - now)))

    def _push_pending(self, held: Mapping[str, str], out: list[Effect]) -> None:
        ready = joiners(self._current, self.records, held)
        if ready - self._pending:
            self._pending = ready
            out += change_pending(self._current, self.records, ready)

    # ------------------------------------------------------------ helpers

    def _in_force(self, quorum_id: int) -> bool:
        """R14 repeats an answer only while it is true: whoever missed the whole life of a quorum must not enter it."""
        current = self._current
        if not self.rules.r14_in_force:
            return True
        return current is not None and current.quorum_id == quorum_id and not current.ended

    def _end_current(self, now: float) -> None:
        if self._current is not None and not self._current.ended:
            self._current = replace(self._current, ended=True, ended_at=now)

    def _saw_commit(self, epoch: int, reporter: Record) -> None:
        """A step was committed in the quorum `epoch`: every member of it has got past its first commit (R15).

        A peer's word counts, because the dead cannot speak, and it may come after a death has been counted as a crash.
        """
        current = self._current
        if current is None or epoch != current.quorum_id or self._news.known(epoch, reporter):
            return
        if not self._trained:  # not on later ones: a link may have been cut since
            self.reachability.committed(current.members)
        self._trained = True
        self._crashes.committed(members := [r for i in current.members if (r := self.records.get(i)) is not None])
        self._builds.forgive(members)

    def _evict(self) -> bool:
        """Make room for a newcomer."""
        least = least_needed(self.records, self._current.members if self._current else ())
        return self.records.pop(least, None) is not None

    def _view(self, now: float) -> View:
        view = view_of(self.records, self._current, self.expected, self._settings, self._claims, self.rules, now)
        view = replace(view, cut=self.reachability.cut(now, self.rules))
        return replace(view, boot_until=self._boot_until, restart_until=self._boot_at + view.orphan_s)
