"""The lighthouse in the simulation: the shell around a real Room, and one lease stream per group.

A stream (`Conn`) is in order both ways, and what is under way is lost when it breaks. A lighthouse that is started
again remembers nothing.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ft_core.errors import JobFinishedError, RefusedError, StateLostError
from ft_core.protocol.lighthouse import events as room_events
from ft_core.protocol.lighthouse.reachability import Holds
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.room_view import peers_of
from ft_core.protocol.pushes import Acked, Answer, Busy, Change, Lost, Over, Push, Reason, Refusal, Welcome
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.settings import LighthouseSettings
from tests.simulation import encoding
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.group import Group
    from tests.simulation.world import World


class Lighthouse:
    """The shell around a Room: performs its effects on the lease streams."""

    def __init__(self, world: World, boot: int) -> None:
        self.world = world
        config = world.config
        ids = QuorumIds(
            boot, world.rng.randrange(1 << 16), deque(world.rng.randrange(1 << 16) for _ in range(8)),
            unique=config.unique_ids,
        )  # fmt: skip
        settings = LighthouseSettings(
            min_replicas=1, join_timeout_s=0.1, boot_window_s=config.boot_window_s, grace_s=config.grace_s
        )
        holds = Holds(hold_s=1.0, retry_s=5.0, max_s=10.0)
        self.room = Room("job", settings, ids, boot_at=world.now, rules=config.room_rules, holds=holds)
        self.conns: dict[str, Conn] = {}
        self._wake_at = -1.0
        self._settles = False

    def handle(self, event: room_events.Event) -> None:
        """One event in, all effects out: those that a decision has in a large room a moment later."""
        settle_s = self.world.config.settle_s
        self._perform_all(self.room.take((event,), self.world.now))
        if self.room.unsettled and settle_s == 0.0:
            self._settle()
        elif self.room.unsettled and not self._settles:
            self._settles = True
            self.world.at(settle_s, None, self._settle)
        self._arm()

    def _settle(self) -> None:
        if self.world.lighthouse is self:
            self._settles = False
            self._perform_all(self.room.settle(self.world.now))
            self._arm()

    def _arm(self) -> None:
        wake, now = self.room.next_at, self.world.now
        if wake is not None and not self._settles and (wake < self._wake_at or self._wake_at <= now):
            self._wake_at = wake
            self.world.at(max(0.0, wake - now), None, self._tick, wake)

    def _perform_all(self, effects: list[room_events.Effect]) -> None:
        self.room.validate()
        for effect in effects:
            self._perform(effect)

    def _tick(self, wake: float) -> None:
        if self.world.lighthouse is self and wake == self._wake_at:
            self._wake_at = -1.0
            self.handle(room_events.Tick())

    def _perform(self, effect: room_events.Effect) -> None:
        world = self.world
        match effect:
            case room_events.Announce(quorum, to):
                world.history.formed_or_repeated(quorum, world.boots, self.room)
                encoding.check_status(self.room, world.now)
                for replica_id, seq in to:
                    self._push(replica_id, Answer(seq, quorum))
            case room_events.Note(text):
                world.say("lighthouse: %s", text)
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

    def _check_lost(self, replica_id: str) -> None:
        """R21: nobody whose lease stands holds what the job has committed."""
        members = self.room.current.members if self.room.current else ()
        for group in self.world.active.values():
            conn = group.conn
            leased = group.alive and not group.done and conn is not None and conn.client_open and conn.server_open
            held = {rank.machine.held.version for rank in group.ranks}  # several: the group's state is none
            if leased and len(held) == 1 and min(held).step > 0 and group.rid in members:
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
        self.heard_at = self.world.now
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._up_at = self._down_at = 0.0

    def send(self, event: room_events.Event, sent_at: float) -> None:
        """Client to lighthouse."""
        if self.client_open:
            self._up_at = max(self._up_at, self.world.now + self.world.between(0.001, 0.02))
            message = encoding.to_lighthouse(event)
            self.world.at(self._up_at - self.world.now, None, self._arrive, message, sent_at)

    def _arrive(self, event: room_events.Event, sent_at: float) -> None:
        if not self.server_open or self.world.lighthouse is not self.lighthouse:
            return
        if self.group.cut_lighthouse:
            self.held.append((self._arrive, (event, sent_at)))
            return
        self.heard_at = self.world.now
        if isinstance(event, room_events.Hello):
            self.lighthouse.conns[self.group.rid] = self
            self.group.unleased_since = None
        self.lighthouse.handle(event)
        room = self.lighthouse.room
        if isinstance(event, room_events.Hello):
            peers = peers_of(room.current, room.last_quorum, room.records, self.group.rid)
            self.push(Welcome(self.world.config.liveness_s, peers))
        if isinstance(event, room_events.Asked) and room.reason:  # its shell tells who asks what it has told the others
            self.push(Reason(room.reason, max(0.0, room.paused_until - self.world.now)))
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
        if self.group.cut_lighthouse or self.group.deaf:
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
        world.at(world.between(0.001, 0.03), None, self.end)
        world.at(world.between(0.001, 0.02), self.group, self.group.conn_lost, self)

    def end(self) -> None:
        """The lighthouse's end of the stream ends."""
        if not self.server_open:
            return
        self.server_open = False
        if self.lighthouse.conns.get(self.group.rid) is self and self.group.unleased_since is None:
            self.group.unleased_since = self.world.now
        if self.world.lighthouse is self.lighthouse:
            silence = self.world.now - self.heard_at
            self.lighthouse.handle(room_events.LeaseEnded(self.group.rid, self.generation, silence))
