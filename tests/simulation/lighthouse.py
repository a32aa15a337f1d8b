"""The lighthouse in the simulation: the shell around a real Room, and one lease stream per group.

A stream (`Conn`) is in order both ways, and what is under way is lost when it breaks. A lighthouse that is started
again remembers nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ft_core.errors import JobFinishedError, RefusedError, StateLostError
from ft_core.protocol.lighthouse import events as room_events
from ft_core.protocol.lighthouse.pair import REPORTS_PER_LIVENESS, Feed, Pair, Send, Serve, StandBy
from ft_core.protocol.lighthouse.partner import ALONE
from ft_core.protocol.lighthouse.reachability import Holds
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.room_view import peers_of
from ft_core.protocol.pushes import Acked, Answer, Busy, Change, Lost, Over, Push, Reason, Refusal, Welcome
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import VOID
from ft_core.settings import LighthouseSettings
from tests.simulation import encoding
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.lighthouse.pair import Action, Report
    from ft_core.protocol.lighthouse.partner import Proposal, Told
    from tests.simulation.group import Group
    from tests.simulation.world import World


ROOM = "job"


class Lighthouse:
    """The shell around a Room: performs its effects on the lease streams.

    One of a pair has a `Pair` as well, which says when it serves; its room is made anew each time that it does.
    """

    def __init__(self, world: World, boot: int, number: int, index: int = 0) -> None:
        self.world = world
        self.index = index
        """Its place in the clients' lists."""
        self.number = number
        """Of all lighthouses that were started in this run."""
        self.sent_at = 0.0
        """When what it sent the other one last arrives there."""
        self.alive, self.frozen, self.frozen_at = True, False, 0.0
        self.flushes = False
        """What it had sent the other one when it was killed arrives there."""
        self.deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        config = world.config
        self._ids = QuorumIds(
            boot, world.rng.randrange(1 << 16), deque(world.rng.randrange(1 << 16) for _ in range(8)),
            unique=config.unique_ids,
        )  # fmt: skip
        self.conns: dict[str, Conn] = {}
        self.pair: Pair | None = None
        if config.pair:
            self.pair = Pair(world.rng.getrandbits(63) | 1, f"lighthouse {1 - index}", config.liveness_s, world.now)
        self.room = self._new_room()
        self._wake_at = -1.0
        self._settles = False
        self._rest: list[room_events.Effect] = []
        """What it was about to do when it was frozen."""
        self._sent: Told | None = None
        self._pair_at = -1.0
        if self.pair is not None:
            world.at(0.0, self, self._beat)

    def _new_room(self) -> Room:
        config, world = self.world.config, self.world
        settings = LighthouseSettings(
            min_replicas=1, join_timeout_s=0.1, boot_window_s=config.boot_window_s, grace_s=config.grace_s
        )
        holds = Holds(hold_s=1.0, retry_s=5.0, max_s=10.0)
        told = self.pair.known(ROOM) if self.pair is not None else ()
        closed = max((t.closed, t.finished) for t in told) if told else ("", VOID)
        return Room(
            ROOM, settings, self._ids, boot_at=world.now, rules=config.room_rules, holds=holds, closed=closed, told=told
        )

    @property
    def serves(self) -> bool:
        """It takes leases."""
        return self.alive and (self.pair is None or self.pair.serves)

    # ------------------------------------------------------------ a process

    def defer(self, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do it when this process is thawed."""
        self.deferred.append((fn, args))

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen, self.frozen_at = True, self.world.now
        for conn in list(self.conns.values()):
            self.world.at(self.world.config.liveness_s, None, self._missed, conn)

    def _missed(self, conn: Conn) -> None:
        """Its clients' keepalives have gone unanswered for a liveness timeout."""
        if self.frozen and self.alive and conn.client_open:
            conn.client_open = False
            self.world.at(0.001, conn.group, conn.group.conn_lost, conn)

    def thaw(self) -> None:
        """SIGCONT: what arrived meanwhile is handled now."""
        if not self.frozen:
            return
        self.frozen = False
        effects, self._rest = self._rest, []
        self._perform_all(effects)
        if self.world.now - self.frozen_at > self.world.config.liveness_s and self.serves:
            self.handle(room_events.Turbulence())
        deferred, self.deferred = self.deferred, []
        for position, (fn, args) in enumerate(deferred):
            self.world.at(position * 1e-6, self, fn, *args)
        for conn in list(self.conns.values()):
            if not conn.client_open:
                self.world.at(0.001, self, conn.end)

    def die(self) -> None:
        """The process ends, and with it the leases that it had given."""
        self.alive = False
        for conn in list(self.conns.values()):
            conn.end()

    # ------------------------------------------------------------ the other one of a pair

    def _beat(self) -> None:
        """Report, several times per liveness timeout."""
        assert self.pair is not None
        self._report(complete=self.pair.tells_all)
        self.world.at(self.world.config.liveness_s / REPORTS_PER_LIVENESS, self, self._beat)
        self._act(self.pair.tick(self.world.now))

    def _report(self, *, complete: bool = False) -> None:
        assert self.pair is not None
        told: tuple[Told, ...] = ()
        if self.pair.serves and (complete or self.room.told != self._sent):
            self._sent = self.room.told
            told = (self._sent,)
        elif complete:
            told = tuple(self.pair.all_known())
        self._send(self.pair.report(len(self.conns), told, complete=complete))

    def _send(self, report: Report) -> None:
        if self._runs:
            self.world.report(self, encoding.report(report))
        else:
            self.world.at(0.0, self, self._send, report)

    def hears(self, report: Report) -> None:
        """A report of the other one has arrived."""
        assert self.pair is not None
        if report.answers:
            self._reaches("answered")
            if not self._runs:
                self.world.at(0.0, self, self.hears, report)
                return
        before = self.pair.contact
        self._act(self.pair.heard(report, self.world.now, len(self.conns)))
        if self.pair.contact != before:
            self._report(complete=True)

    def partner_ended(self) -> None:
        """The connection of the other one has ended."""
        assert self.pair is not None
        self._act(self.pair.ended())

    def _act(self, actions: list[Action]) -> None:
        assert self.pair is not None
        for place, action in enumerate(actions):
            if not self._runs:
                self.world.at(0.0, self, self._act, actions[place:])
                return
            match action:
                case Send():
                    self._send(action.report)
                    if any(accepted for _, accepted in action.report.answers):
                        self._reaches("recorded")
                case Serve():
                    self.world.say("lighthouse %d serves", self.index)
                    self.room = self._new_room()
                    self.handle(room_events.PartnerIs(self.pair.partner))
                    self._report()
                case StandBy():
                    self.world.say("lighthouse %d stands by", self.index)
                    self.room.take((room_events.PartnerIs(ALONE),), self.world.now)
                    self.pair.stops(self.room.told, self.world.now)
                    for conn in list(self.conns.values()):
                        conn.break_()
                        conn.end()  # its own end at once
                    self.conns.clear()
                    self._report()
                case Feed():
                    if self.pair.serves:
                        self.handle(action.event)
        if self.pair.next_at < float("inf") and self._pair_at != self.pair.next_at:
            self._pair_at = self.pair.next_at
            self.world.at(max(0.0, self._pair_at - self.world.now), self, self._pair_tick, self._pair_at)

    def _pair_tick(self, at: float) -> None:
        assert self.pair is not None
        if at == self._pair_at:
            self._pair_at = -1.0
            self._act(self.pair.tick(self.world.now))

    # ------------------------------------------------------------ the room

    def handle(self, event: room_events.Event) -> None:
        """One event in, all effects out: those that a decision has in a large room a moment later."""
        settle_s = self.world.config.settle_s
        self._perform_all(self.room.take((event,), self.world.now))
        if self.room.unsettled and settle_s == 0.0:
            self._settle()
        elif self.room.unsettled and not self._settles:
            self._settles = True
            self.world.at(settle_s, self, self._settle)
        self._arm()
        if self.pair is not None and self._runs and self.room.told != self._sent:
            self._report()

    def _settle(self) -> None:
        self._settles = False
        if self.serves:
            self._perform_all(self.room.settle(self.world.now))
            self._arm()

    def _arm(self) -> None:
        wake, now = self.room.next_at, self.world.now
        if wake is not None and not self._settles and (wake < self._wake_at or self._wake_at <= now):
            self._wake_at = wake
            self.world.at(max(0.0, wake - now), self, self._tick, wake)

    def _perform_all(self, effects: list[room_events.Effect]) -> None:
        self.room.validate()
        for effect in effects:
            if not self._stopped(effect):
                self._perform(effect)

    def _tick(self, wake: float) -> None:
        if self.serves and wake == self._wake_at:
            self._wake_at = -1.0
            self.handle(room_events.Tick())

    def _perform(self, effect: room_events.Effect) -> None:
        world = self.world
        match effect:
            case room_events.Announce(quorum):
                world.history.formed_or_repeated(quorum, self.number, self.room)
                encoding.check_status(self.room, world.now)
                self._announce(effect)
            case room_events.Propose(proposal):
                self._propose(proposal)
            case room_events.Note(text):
                self._say(text)
            case room_events.Explain(to, reason, paused_s):
                world.say("lighthouse to %s: %s", ", ".join(to), reason)
                self._push_all(to, Reason(reason, paused_s))
            case room_events.Superseded(replica_id, quorum_id):
                self._push(replica_id, Over(quorum_id))
            case room_events.Refuse(replica_id, reason, finished, lost):
                if lost:
                    self._check_lost(replica_id)
                error = JobFinishedError if finished else StateLostError if lost else RefusedError
                self._push(replica_id, Refusal(error(reason)))
            case room_events.MemberLost(to, quorum_id, lost, held, failed):
                self._push_all(to, Lost(quorum_id, lost, held, failed))
            case room_events.ChangePending(to, quorum_id, reason):
                self._push_all(to, Change(quorum_id, reason))
            case room_events.Paused(to, quorum_id, who, for_s):
                self._push_all(to, Busy(quorum_id, who, for_s))

    def _propose(self, proposal: Proposal) -> None:
        assert self.pair is not None
        self._send(replace(self.pair.report(len(self.conns)), proposals=(proposal,)))
        self._reaches("proposed")

    def _announce(self, effect: room_events.Announce) -> None:
        """Answer one after the other; a fault may strike in between."""
        to = effect.to
        for place in range(len(to) + 1):
            if len(to) == len(effect.quorum.ids):
                self._reaches("announced", place / len(to))
            if self._stopped(replace(effect, to=to[place:])):
                return
            for replica_id, seq in to[place : place + 1]:
                self._push(replica_id, Answer(seq, effect.quorum))

    def _reaches(self, moment: str, told: float = 0.0) -> None:
        if self.pair is not None:
            self.world.faults.moments.reached(moment, self, told)

    @property
    def _runs(self) -> bool:
        return self.alive and not self.frozen

    def _stopped(self, *effects: room_events.Effect) -> bool:
        """Whether it does nothing more, or does these when it is thawed."""
        if self.frozen:
            self._rest += effects
        return not self._runs

    def _say(self, text: str) -> None:
        if self.pair is None:
            self.world.say("lighthouse: %s", text)
        else:
            self.world.say("lighthouse %d: %s", self.index, text)

    def _check_lost(self, replica_id: str) -> None:
        """R21: no living member holds what the job has committed, unless no lighthouse had its lease for orphan_s."""
        members = {*(self.room.current.members if self.room.current else ())}
        if self.pair is not None:
            members.update(*(basis.members for basis in self.room.told.bases))
        for group in self.world.active.values():
            away = self.world.now - (self.world.now if group.unleased_since is None else group.unleased_since)
            held = {rank.machine.held.version for rank in group.ranks}  # several: the group's state is none
            holds = group.alive and not group.done and len(held) == 1 and min(held).step > 0
            if holds and away < self.world.config.orphan_s - 1e-9 and group.rid in members:
                raise Violation("I7", f"{replica_id} is told that all state is lost, but {group.rid} holds it")

    def _push_all(self, to: tuple[str, ...], push: Push) -> None:
        for replica_id in to:
            self._push(replica_id, push)

    def _push(self, replica_id: str, push: Push) -> None:
        conn = self.conns.get(replica_id)
        if conn is not None:
            conn.push(push)


class Conn:
    """One lease stream: ordered both ways; messages under way are lost when it breaks."""

    def __init__(self, group: Group, lighthouse: Lighthouse, generation: int) -> None:
        self.world = group.world
        self.group = group
        self.lighthouse = lighthouse
        self.generation = generation
        self.client_open = self.server_open = True
        self.leased = False
        """Its Hello has arrived: until then it is an attempt."""
        self.heard_at = self.world.now
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._up_at = self._down_at = 0.0

    def send(self, event: room_events.Event, sent_at: float) -> None:
        """Client to lighthouse."""
        if self.client_open:
            self._up_at = max(self._up_at, self.world.now + self.world.between(0.001, 0.02))
            message = encoding.to_lighthouse(event)
            self.world.at(self._up_at - self.world.now, self.lighthouse, self._arrive, message, sent_at)

    def _arrive(self, event: room_events.Event, sent_at: float) -> None:
        if not self.server_open:
            return
        if not self.lighthouse.serves:
            self.break_()
            return
        if self.group.cut_off(self.lighthouse):
            self.held.append((self._arrive, (event, sent_at)))
            return
        self.heard_at = self.world.now
        if isinstance(event, room_events.Hello):
            self.lighthouse.conns[self.group.rid] = self
            self.group.unleased_since, self.leased = None, True
        self.lighthouse.handle(event)
        room = self.lighthouse.room
        if isinstance(event, room_events.Hello):
            peers = peers_of(room.current, room.last_quorum, room.records, self.group.rid)
            self.push(Welcome(self.world.config.liveness_s, peers))
        if (
            isinstance(event, room_events.Asked) and room.waits.reason
        ):  # its shell tells who asks what it has told the others
            self.push(Reason(room.waits.reason, max(0.0, room.waits.paused_until - self.world.now)))
        if isinstance(event, room_events.Hello | room_events.Progress):
            self.push(Acked(sent_at))
        elif isinstance(event, room_events.Left):
            self.server_open = False

    def push(self, push: Push) -> None:
        """Lighthouse to client."""
        if self.server_open:
            self._down_at = max(self._down_at, self.world.now + self.world.between(0.001, 0.02))
            self.world.at(self._down_at - self.world.now, self.group, self._deliver, encoding.push(push))

    def _deliver(self, push: Push) -> None:
        if not self.client_open or self.group.conn is not self:
            return
        if self.group.cut_off(self.lighthouse) or self.group.deaf:
            self.held.append((self._deliver, (push,)))
            return
        self.group.on_push(push)

    def release(self) -> None:
        """A partition ended: TCP sends again what was held up, if the connection still stands."""
        held, self.held = self.held, []
        for fn, args in held:
            fn(*args)

    def break_(self) -> None:
        """The connection breaks; both ends notice, each in its own time."""
        world = self.world
        self.client_open = False
        world.at(world.between(0.001, 0.03), self.lighthouse, self.end)
        world.at(world.between(0.001, 0.02), self.group, self.group.conn_lost, self)

    def end(self) -> None:
        """The lighthouse's end of the stream ends."""
        if not self.server_open:
            return
        self.server_open = False
        other = self.group.conn
        if self.leased and (other is self or not (other and other.server_open and other.leased)):
            self.group.unleased_since = self.group.unleased_since or self.world.now
        if self.lighthouse.pair is not None and self.lighthouse.conns.get(self.group.rid) is self:
            del self.lighthouse.conns[self.group.rid]
        if self.lighthouse.serves:
            silence = self.world.now - self.heard_at
            self.lighthouse.handle(room_events.LeaseEnded(self.group.rid, self.generation, silence))
