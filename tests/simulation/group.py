"""A replica group in the simulation: one process, its lease, its leader and its ranks.

It dies, freezes and is cut off as a process does: a frozen one does nothing, and handles what arrived when it thaws.
Its lease is opened anew until that works, and the ask that is open is presented on each new stream (R14).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.errors import JobFinishedError, StateLostError
from ft_core.protocol.group import events as group_events
from ft_core.protocol.lighthouse import events as room_events
from ft_core.protocol.lighthouse.model_signature import setting_lines
from ft_core.protocol.pushes import Acked, Answer, Push, Refusal, Welcome
from ft_core.protocol.rank import events as rank_events
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.protocol.rank.rank import Rank as Machine
from ft_core.protocol.rank.settings import RankSettings
from ft_core.protocol.types import VOID, Ask, Version
from tests.simulation.history import Violation
from tests.simulation.leader import Leader
from tests.simulation.lighthouse import Conn
from tests.simulation.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.lighthouse import Lighthouse
    from tests.simulation.world import World

LAYOUT = 7
"""Hash over what has to be equal."""


class Group:
    """One incarnation of a replica group: its lease, its leader, its ranks."""

    def __init__(self, world: World, number: int, incarnation: int) -> None:
        self.world = world
        self.number = number
        self.name = "abcdefgh"[number]
        self.rid = f"{self.name}:{incarnation}"
        self.key = number * 1000 + incarnation
        self.incarnation = incarnation
        self.alive = True
        self.done = False
        self.frozen = False
        self.leader_only = False
        """Of its processes only the leader's is frozen."""
        self.cut_lighthouse = self.cut_peers = False
        self.cut_from: set[int] = set()
        """Lighthouses of a pair (places in its list) that it cannot reach, and that cannot reach it."""
        self.at = 0
        """The place in its list of lighthouses of the one that it tries, or has a lease with."""
        self.proxy_down = False
        """It cannot open a connection to the lighthouse; those it had were closed, although it lives."""
        self.deaf = False
        """What the lighthouse sends does not reach it."""
        self.leaving = False
        self.deferred: list[tuple[Group | Rank, Callable[..., None], tuple[Any, ...]]] = []
        self.injected: set[str] = set()
        self.slow_until = 0.0
        self.full_until = 0.0
        """Until when it has no free place for one more receiver of its state."""
        self.unsendable = False
        """What it holds cannot be encoded, and it says so."""
        self.late_until = 0.0
        """Until when one of its ranks does not vote, and says nothing."""
        self.paused_until = 0.0
        """Until when one of its ranks is busy, as its leader says."""
        self._incomplete: tuple[int, str] | None = None
        """What was reported since the last ask: a rank is missing."""
        self.last_ack = 0.0
        self.commits = 0
        self.unleased_since: float | None = world.now
        self.excused_at = -1.0
        self.reported = (-1.0, 0)
        self.conn: Conn | None = None
        self._generation = 0
        self._open_ask: Ask | None = None
        self.welcomed = False
        """The lighthouse has taken its lease."""
        self.peers: tuple[str, ...] = ()
        """Members of the quorum that was in force when its lease was opened: of whom it may copy live state."""
        self.known_cut: tuple[str, ...] = ()
        """Whom it could not reach when it looked last."""
        self.ranks: list[Rank] = []
        self.leader = Leader(self)

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else "alive" if self.alive else "dead"
        asks = f", asking seq {self._open_ask.seq}" if self._open_ask else ""
        return f"{self.rid} ({state}{asks}, {', '.join(repr(r.machine) for r in self.ranks)})"

    @property
    def busy_until(self) -> float:
        """Until when one of its ranks has announced to be busy; 0: none has."""
        return max((rank.busy_until for rank in self.ranks), default=0.0)

    # ------------------------------------------------------------ life

    def _odd_in(self, what: str) -> bool:
        return self.number == self.world.config.odd_group and self.world.config.odd == what

    @property
    def min_replicas(self) -> int:
        """min_replica_size; a larger one than there are groups if it is odd in that."""
        config = self.world.config
        usual = config.choosy[1] if config.choosy[0] == self.number else config.min_replicas
        return config.groups + 5 if self._odd_in("min") else usual

    @property
    def fixed_with_spares(self) -> bool:
        """world_size_mode."""
        return self.world.config.fixed_with_spares != self._odd_in("mode")

    def signature_lines(self) -> tuple[str, ...]:
        """What is compared with other groups."""
        return setting_lines({"world_size_mode": "FIXED_WITH_SPARES" if self.fixed_with_spares else "DYNAMIC"})

    def start(self) -> None:
        """The process is up."""
        config = self.world.config
        for index in range(config.ranks):
            settings = RankSettings(
                replica_id=self.rid, group_rank=index, group_world_size=config.ranks, min_replicas=self.min_replicas,
                mode=WorldSizeMode.FIXED_WITH_SPARES if self.fixed_with_spares else WorldSizeMode.DYNAMIC,
                timeout_s=config.timeout_s, autonomy_s=config.autonomy_s, orphan_s=config.orphan_s,
                look_s=config.look_s, rules=config.member_rules,
            )  # fmt: skip
            machine = Machine(settings, lineage=self.world.rng.getrandbits(62), now=self.world.now)
            machine.describe(LAYOUT + (config.compared and self.fixed_with_spares))
            if self.leaving:
                machine.handle(rank_events.LeaveWanted(), self.world.now)
            self.ranks.append(Rank(self, index, machine))
        self.leader.start()
        self.connect()
        self.world.at(self.world.between(0.0, 0.1), self, self._progress)
        for rank in self.ranks:
            late = self.world.between(0.3, 3.0) if config.late_rank and rank.index == config.ranks - 1 else 0.0
            self.world.at(late + self.world.between(0.01, 0.15), self, rank.start)

    def die(self, how: str, *, hidden: bool = False) -> None:
        """The process ends without a word."""
        world = self.world
        if not self.alive:
            return
        self.alive = False
        world.active.pop(self.rid, None)
        world.trouble_at = world.now
        world.say("%s %s%s", self.rid, how, " (its sockets stay open in a forked child)" if hidden else "")
        if self.conn is not None:
            soon = world.config.liveness_s if self.cut_lighthouse else world.between(0.001, 0.02)
            world.at(soon, None, self.conn.end)
        for rank in self.ranks:
            rank.leave_ring(hidden=hidden)
        if world.config.supervised and how == "is killed":
            alone = not world.living(self.number)  # a name's word is given only when no process of that name is left
            word = self.name if alone and world.rng.random() < 0.5 else self.rid
            world.at(world.between(0.01, 0.6), None, self._supervisor, word)

    def ordered_to_end(self, reason: str) -> None:
        """All its processes end, also one that is frozen, and its supervisor starts it again."""
        if self.alive:
            self.die(f"ends: {reason}")
            self.world.at(self.world.between(0.02, 1.0), None, self.world.restart, self.number)

    def _supervisor(self, word: str) -> None:
        lighthouse = self.world.lighthouse
        if lighthouse is not None and not lighthouse.frozen:
            self.world.say("the supervisor reports the end of %s", word)
            lighthouse.handle(room_events.Ended(word))

    def defer(self, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do it when this process is thawed."""
        self.deferred.append((self, fn, args))

    def freeze(self, *, leader_only: bool = False) -> None:
        """SIGSTOP: to all its processes, or to the one that leads."""
        self.world.say("%s is frozen", self.ranks[0].name if leader_only else self.rid)
        self.frozen, self.leader_only = True, leader_only
        for link in self.leader.links[1:] if leader_only else ():
            if link.stream is not None:
                self.world.at(self.world.config.liveness_s, link.rank, link.leader_silent, link.stream)
        if self.conn is not None:
            self.world.at(self.world.config.liveness_s, None, self._missed, self.conn, True)

    def thaw(self) -> None:
        """SIGCONT: what arrived meanwhile is handled now."""
        if not self.alive or not self.frozen:
            return
        self.world.say("%s is thawed", self.rid)
        self.frozen = False
        self.world.trouble_at = self.world.now
        deferred, self.deferred = self.deferred, []
        for position, (owner, fn, args) in enumerate(deferred):
            self.world.at(position * 1e-6, owner, fn, *args)
        if self.conn is not None and not self.conn.server_open:
            self.world.at(self.world.between(0.0, 0.01), self, self.conn_lost, self.conn)
        self.world.recheck()

    def set_cut(self, cut: bool) -> None:
        """Packets to and from the lighthouse are dropped, or pass again."""
        self.cut_lighthouse = cut
        if self.conn is None:
            return
        if cut:
            self.world.at(self.world.config.liveness_s, None, self._missed, self.conn, False)
        else:
            self.conn.release()
            if not self.conn.server_open:
                self.world.at(0.001, self, self.conn_lost, self.conn)

    def cut_off(self, lighthouse: Lighthouse) -> bool:
        """Packets between it and this lighthouse are dropped."""
        return self.cut_lighthouse or lighthouse.index in self.cut_from

    def cut_one(self, index: int, cut: bool) -> None:
        """The same for one lighthouse of a pair."""
        (self.cut_from.add if cut else self.cut_from.discard)(index)
        conn = self.conn
        if conn is None or conn.lighthouse.index != index:
            return
        if cut:
            self.world.at(self.world.config.liveness_s, None, self._missed, conn, False)
        else:
            conn.release()
            if not conn.server_open:
                self.world.at(0.001, self, self.conn_lost, conn)

    def _missed(self, conn: Conn, by_freeze: bool) -> None:
        """Keepalives went unanswered for a liveness timeout."""
        still = self.frozen if by_freeze else self.cut_off(conn.lighthouse)
        if still and self.alive and self.world.now - conn.heard_at >= self.world.config.liveness_s - 1e-9:
            conn.end()
            if not by_freeze:
                self.world.at(0.001, self, self.conn_lost, conn)
        elif still and self.alive and conn.server_open:
            left = self.world.config.liveness_s - (self.world.now - conn.heard_at)
            self.world.at(max(left, 0.001), None, self._missed, conn, by_freeze)

    # ------------------------------------------------------------ the lease

    def connect(self) -> None:
        """Open a lease stream; tried again until it works."""
        world = self.world
        if self.conn is not None and self.conn.client_open:
            return
        lighthouse = self._reachable()
        if lighthouse is None:
            world.at(world.between(0.3, 1.0) * world.config.reconnect_s, self, self.connect)
            return
        self._generation += 1
        self.conn = Conn(self, lighthouse, self._generation)
        self.conn.send(self.hello(), world.now)
        if self._open_ask is not None:
            self.conn.send(room_events.Asked(self._open_ask, self._generation), world.now)
        if self._incomplete is not None:
            self.report_incomplete(*self._incomplete)

    def _reachable(self) -> Lighthouse | None:
        """The next lighthouse of its list that takes it, once through the list."""
        if self.cut_lighthouse or self.proxy_down or self.deaf:
            return None
        for _ in self.world.lighthouses:
            lighthouse = self.world.lighthouses[self.at]
            if lighthouse is not None and lighthouse.serves and not lighthouse.frozen and not self.cut_off(lighthouse):
                return lighthouse
            self.at = (self.at + 1) % len(self.world.lighthouses)
        return None

    def conn_lost(self, conn: Conn) -> None:
        """The client sees its stream end."""
        if conn is self.conn:
            conn.client_open = False
            self.world.at(self.world.between(0.0, 0.03), self, self.connect)

    def hello(self) -> room_events.Hello:
        """What this group presents when it (re-)opens its lease: rank 0 does it for all."""
        config, rank = self.world.config, self.ranks[0].machine
        quorum = rank.quorum
        return room_events.Hello(
            self.rid, self.name, self._generation, self.incarnation, version=rank.held.version,
            stable=rank.held.stable, highest_id=rank.highest_id, quorum_id=quorum.quorum_id if quorum else 0,
            members=quorum.ids if quorum else (), expected=config.expected, min_replicas=self.min_replicas,
            group_world_size=config.ranks, join_s=config.join_s, liveness_s=config.liveness_s,
            orphan_s=config.orphan_s, paused_s=max(0.0, self.paused_until - self.world.now),
            signature=rank.attempt.signature, signature_lines=self.signature_lines(),
            cast=rank.cast, fenced=rank.entered_by_all, after=rank.after,
        )  # fmt: skip

    def stable(self) -> Version:
        """The newest version every rank knows to be held by its whole quorum."""
        return min(rank.machine.held.stable for rank in self.ranks)

    def _progress(self) -> None:
        world = self.world
        if not self.done:
            self.report()
            world.at(world.config.progress_s * world.between(0.8, 1.0), self, self._progress)

    def report(self) -> None:
        """Renew the lease."""
        if self.done or self.conn is None or not self.conn.client_open:
            return
        rank, now = self.ranks[0].machine, self.world.now
        paused = max(0.0, self.paused_until - now)
        event = room_events.Progress(
            self.rid,
            self._generation,
            max(rank.held.version.step, 0),
            rank.phase.value,
            rank.held.stable,
            paused,
        )
        self.conn.send(event, now)

    def on_push(self, push: Push) -> None:
        """Something arrived from the lighthouse."""
        match push:
            case Acked():
                self.leader.handle(group_events.Welcomed())
                rank, self.last_ack = self.ranks[0].machine, max(self.last_ack, push.clock_s)
                rank.acknowledged(push.clock_s)
            case Answer():
                if self._open_ask is not None and self._open_ask.seq == push.seq:
                    self._open_ask = None
                    self.leader.handle(group_events.Answered(push.seq, push.quorum))
            case Welcome():
                self.welcomed = True
                self.peers = tuple(name for name, _ in push.peers)
            case Refusal():
                self.leader.handle(group_events.RefusedByLighthouse(push.error))
            case _:
                self.leader.handle(group_events.Pushed(push))

    def refused(self, error: Exception) -> None:
        """It is over."""
        world, finished = self.world, isinstance(error, JobFinishedError)
        world.say("%s is refused: %s", self.rid, error)
        void = self.ranks[0].machine.held.version < Version(0, 0)
        fine = self.ranks[0].machine.plan is not None and not world.set_up_wrongly(self.number)
        lost = isinstance(error, StateLostError) or void
        if world.config.odd and fine and not (finished or lost):  # where nobody was in a quorum, the first one counts
            raise Violation("I7", f"{self.rid} is refused because of one that is set up wrongly: {error}")
        if finished and not self.world.config.finish_at:
            raise Violation("I7", f"{self.rid} is refused: {error}: but nobody has finished")
        self.stop()
        if lost:  # R21: whoever runs the job decides that it may begin again
            world.at(world.between(0.4, 1.0), None, world.begin_again, self.number)

    def ask(self, ask: Ask) -> None:
        """All ranks have asked: so does the group."""
        self._open_ask, self._incomplete = ask, None
        if ask.version == VOID:  # some of its ranks were healed, some not: as good as torn
            for rank in self.ranks:
                rank.was_torn = True
        self.world.say(
            "%s asks (seq %d) at %s, leaving %#x%s: %s", self.rid, ask.seq, ask.version, ask.quorum_id,
            ", failed" if ask.failed else "", ask.reason,
        )  # fmt: skip
        if self.conn is not None and self.conn.client_open:
            self.conn.send(room_events.Asked(ask, self._generation), self.world.now)

    def report_incomplete(self, quorum_id: int, reason: str) -> None:
        """A rank is missing: the lighthouse is told, again on each new lease until all have asked."""
        self._incomplete = quorum_id, reason
        if self.conn is not None and self.conn.client_open:
            event = room_events.Incomplete(self.rid, self._generation, quorum_id, reason)
            self.conn.send(event, self.world.now)

    def look(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """To whom of the last quorum no connection can be opened, and to whom one can."""
        quorum, world = self.ranks[0].machine.quorum, self.world
        others = {*(quorum.ids if quorum else ()), *self.known_cut} - {self.rid}
        reached = {i for i in others if world.can_open(self, world.groups[i])}
        self.known_cut = tuple(sorted(others - reached))
        return self.known_cut, tuple(sorted(reached))

    def goodbye(self, why: str, *, agreed: bool, finished: bool) -> None:
        """Leave on purpose."""
        if self.done:
            return
        self.world.say("%s leaves: %s", self.rid, why)
        if self.conn is not None:
            held = self.ranks[0].machine.held.version
            event = room_events.Left(self.rid, self._generation, why, finished, held, agreed)
            self.conn.send(event, self.world.now)
        self.stop()

    def stop(self) -> None:
        """End the process; its sockets stay open a little longer (R16)."""
        self.done = True
        for rank in self.ranks:
            rank.token += 1
        self.world.at(0.3, None, self.die, "has ended")

    def behind_for_good(self) -> bool:
        """Excluded with allow_heal=False."""
        return any(rank.machine.plan is not None and rank.machine.plan.excluded for rank in self.ranks)
