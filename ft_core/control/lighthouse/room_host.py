"""The lighthouse's rooms and leases: performs what `room.Room` decides.

How it works. Each room is a `room.Room`, which decides, and a `RoomShell`, which holds what is needed to perform:
messages become events, effects become pushes over the open lease streams. There is no tick: one timer per room stands
at `room.next_at` and is set anew after every event. Nothing is awaited between an event and the last of its effects.

A lease is one stream with a generation (a counter of this server); only the newest generation of a replica is
registered. When it ends, the room is told for how long it had been silent, which tells a closed connection from missed
keepalives. Asks that arrive in one turn of the loop are handed in together, and a reason is told once it has stood for
REASON_S: a quorum of 256 forms with a handful of decisions and no explanations.

R15, turbulence. If most leases of a room (and at least TURBULENCE_LEASES) end within TURBULENCE_S, or this process
itself stood still for longer than the liveness timeout, suspicions prove nothing; the rooms are told before anything
else. Standing still is noticed by a beat, which runs only while there are leases.

Invariants: rooms, signatures and every outgoing queue are bounded; what a client sends never ends anybody else's lease.
Everything runs on the server's one loop; the streams are `rpc.stream_host`'s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ft_core.access import Tokens
from ft_core.control.lighthouse.room_events import RoomEvents
from ft_core.errors import FaultToleranceError, JobFinishedError, ProtocolError, RefusedError, StateLostError
from ft_core.events.event_log import SILENT
from ft_core.protocol.lighthouse.events import (
    Announce,
    Asked,
    ChangePending,
    Effect,
    Event,
    Explain,
    Hello,
    Incomplete,
    LeaseEnded,
    Left,
    MemberLost,
    Note,
    Paused,
    Refuse,
    Superseded,
    Tick,
    Turbulence,
)
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.room_keeping import MAX_ROOMS, FinishedRooms, replaceable
from ft_core.protocol.lighthouse.room_view import peers_of
from ft_core.protocol.pushes import Acked, Busy, Change, Lost, Over, Push, Reason, Refusal, Welcome
from ft_core.protocol.quorum_ids import QuorumIds, boot_of
from ft_core.protocol.types import Ask, Quorum
from ft_core.rpc import codec
from ft_core.rpc.stream_host import Caller, StreamHost
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.events.event_log import Events
    from ft_core.rpc.loop_server import Stream
    from ft_core.settings import LighthouseSettings

MAX_SIGNATURES = 64
HELLO_S = 5.0
"""How long an opened stream may take to send its Hello."""
REASON_S = 0.2
"""A reason is told once it has stood for this long: while 256 groups arrive, it changes with every one of them."""
TURBULENCE_S = 0.05
TURBULENCE_LEASES = 3

_log = logging.getLogger("ft_core.lighthouse")


@dataclass
class Waiter:
    """A unary Quorum call."""

    seq: int
    done: asyncio.Future[Quorum]


@dataclass
class RoomShell:
    """One room, and what is needed to perform what it decides."""

    room: Room
    leases: dict[str, Lease] = field(default_factory=dict)
    waiters: dict[str, Waiter] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    reason_timer: asyncio.TimerHandle | None = None
    asks: list[Asked | Incomplete] = field(default_factory=list)
    """Asks that arrived in this turn of the loop: handed to the room together, which then decides once."""
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    turbulent_until: float = 0.0
    said: str = ""
    """The last reason that was logged."""

    def stop(self) -> None:
        """Cancel its timers."""
        for timer in (self.timer, self.reason_timer):
            if timer is not None:
                timer.cancel()


@dataclass(eq=False)
class Lease(Caller):
    """One open lease stream; its name is the replica_id."""

    shell: RoomShell = field(kw_only=True)
    generation: int = field(kw_only=True)
    told: tuple[str, float] = ("", 0.0)
    """The last reason it was sent."""


class Rooms(StreamHost[Lease]):
    """All rooms of one lighthouse, on one event loop.

    Args:
        settings: of the lighthouse.
        liveness_s: the keepalive timeout its server runs with.
        unknown: nobody can know this lighthouse's address from before, so nobody is waited for at its start.
        events: where to write what happens.
    """

    _name = "the lighthouse"
    _first = "Hello"
    _log = _log

    def __init__(
        self, settings: LighthouseSettings, liveness_s: float, unknown: bool = False, events: Events = SILENT
    ) -> None:
        self._offset = time.time() - time.monotonic()  # rooms are told wall-clock seconds that never jump
        super().__init__(Tokens(settings.token, settings.admin_token), HELLO_S, self.now)
        self.settings = settings
        self.liveness_s = liveness_s
        self._rooms: dict[str, RoomShell] = {}
        self._events = RoomEvents(events)
        self._signatures: dict[int, tuple[str, ...]] = {}
        self._generation = 0
        self._seq = 0
        self._boot = secrets.randbits(63)
        entropy = deque(secrets.randbits(16) for _ in range(256))
        self._ids = QuorumIds(boot_of(time.time()), secrets.randbits(16), entropy)
        self.started = self.now()
        self._forgot_at = self.started - unknown * settings.boot_window_s
        self._finished = FinishedRooms()
        self._beat_at = self.started
        self._beat_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Rooms(rooms={len(self._rooms)}, leases={len(self._callers)}, liveness={self.liveness_s:g} s)"

    def close(self) -> None:
        """Cancel all timers, and end the log."""
        self._events.close()
        for shell in self._rooms.values():
            shell.stop()
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None

    # ------------------------------------------------------------ rooms

    def now(self) -> float:
        """Wall-clock seconds that never jump: what rooms are told."""
        return time.monotonic() + self._offset

    def room(self, name: str) -> RoomShell:
        """A room, made if there is none of that name. Raises RefusedError if there are too many."""
        shell = self._rooms.get(name)
        if shell is None:
            if len(self._rooms) >= MAX_ROOMS:
                self._make_place(name)
            room = Room(name, self.settings, self._ids, boot_at=self._forgot_at, closed=self._finished.take(name))
            shell = self._rooms[name] = RoomShell(room)
        return shell

    def _make_place(self, name: str) -> None:
        """Forget a room, for the one called `name`."""
        now = self.now()
        idle = {n: shell.room for n, shell in self._rooms.items() if not shell.leases and not shell.waiters}
        over = replaceable(idle, now, self.liveness_s + self.settings.boot_window_s)
        if not over:
            raise RefusedError(f"all of {MAX_ROOMS} rooms here have living replicas: start a lighthouse for {name!r}")
        (shell := self._rooms.pop(over)).stop()
        self._finished.remember(shell.room)
        if shell.room.current is not None and not shell.room.closed:
            self._forgot_at = now  # whoever returns finds a lighthouse that knows no quorum, as after a restart (R9)

    def chosen(self, name: str) -> list[RoomShell]:
        """The room of that name; all rooms for ''."""
        return [shell for known, shell in self._rooms.items() if name in ("", known)]

    def feed(self, shell: RoomShell, *events: Event) -> list[Effect]:
        """Hand events to a room (after the asks that came before them), perform what follows, set its timer."""
        now = self.now()
        self._notice_stall(now)
        effects = self._decide(shell, events, now)
        self._perform(shell, effects)
        self._arm(shell)
        return effects

    def _decide(self, shell: RoomShell, events: Sequence[Event], now: float, *, first: bool = False) -> list[Effect]:
        """Hand a room events, and the asks that came: before them, or after the `first` of them."""
        asks, shell.asks = shell.asks, []
        taken = (*events, *asks) if first else (*asks, *events)
        effects = shell.room.handle_all(taken, now)
        self._events.fed(shell.room, taken, effects, now)
        return effects

    def _arm(self, shell: RoomShell) -> None:
        if shell.timer is not None:
            shell.timer.cancel()
            shell.timer = None
        if shell.room.next_at is not None:
            when = shell.room.next_at - self._offset
            shell.timer = asyncio.get_running_loop().call_at(when, self._on_timer, shell)

    def _on_timer(self, shell: RoomShell) -> None:
        shell.timer = None
        self.feed(shell, Tick())

    def _perform(self, shell: RoomShell, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Announce():
                    self._announce(shell, effect)
                case Explain():
                    self._explain_soon(shell)
                case ChangePending():
                    self._push(shell, effect.to, Change(effect.quorum_id, effect.reason))
                case MemberLost():
                    self._push(shell, effect.to, Lost(effect.quorum_id, effect.lost, effect.held, effect.failed))
                case Paused():
                    self._push(shell, effect.to, Busy(effect.quorum_id, effect.replica_id, effect.for_s))
                case Superseded():
                    self._push(shell, (effect.to,), Over(effect.quorum_id))
                case Note():
                    self.say(shell, effect.text)
                case Refuse():
                    self.say(shell, f"refused {effect.to}: {effect.reason}")
                    lease = shell.leases.get(effect.to)
                    if lease is not None:  # its ask was refused; a refused Hello has no lease, see _open
                        lease.stream.send(codec.encode_push(Refusal(_refusal(effect))))

    def _announce(self, shell: RoomShell, effect: Announce) -> None:
        shell.said = ""
        shared = codec.encode_quorum(effect.quorum)
        for replica_id, seq in effect.to:
            lease = shell.leases.get(replica_id)
            waiter = shell.waiters.get(replica_id)
            if lease is not None:
                lease.stream.send(codec.answer(seq, shared))
            elif waiter is not None and waiter.seq == seq and not waiter.done.done():
                waiter.done.set_result(effect.quorum)

    @staticmethod
    def _push(shell: RoomShell, to: Sequence[str], push: Push) -> None:
        data = codec.encode_push(push)
        for replica_id in to:
            lease = shell.leases.get(replica_id)
            if lease is not None:
                lease.stream.send(data)

    @staticmethod
    def say(shell: RoomShell, text: str) -> None:
        """A line for the log."""
        where = "" if shell.room.name == DEFAULT_ROOM else f"[{shell.room.name}] "
        _log.info("%s%s", where, text)

    # ------------------------------------------------------------ standing still

    def _beat(self) -> None:
        now = self.now()
        self._notice_stall(now)
        self._beat_at = now
        self._beat_timer = None
        if self._callers:
            self._beat_timer = asyncio.get_running_loop().call_later(self.liveness_s / 4, self._beat)

    def _notice_stall(self, now: float) -> None:
        """Frozen for longer than the liveness timeout: every lease may be about to end through no fault of its own."""
        stood_still_s = now - self._beat_at
        if self._beat_timer is None or stood_still_s <= self.liveness_s:
            return
        self._beat_at = now
        _log.warning("the lighthouse itself stood still for %.1f s", stood_still_s)
        self._events.stood_still(stood_still_s)
        for shell in self._rooms.values():
            if shell.leases:
                self._perform(shell, self._decide(shell, (Turbulence(),), now, first=True))
                self._arm(shell)

    def _lease_opened(self) -> None:
        if self._beat_timer is None:
            self._beat_at = self.now()
            self._beat()

    # ------------------------------------------------------------ leases

    def _let_in(self, first: bytes, stream: Stream) -> Lease | FaultToleranceError:
        opening = codec.decode_lease_request(first)
        if not isinstance(opening, codec.Opening):
            raise ProtocolError("the first message of a lease must be a Hello")
        return self._open(self.room(opening.room), opening.hello, stream)

    def _received(self, lease: Lease, data: bytes) -> None:
        message = codec.decode_lease_request(data, lease.name, lease.generation)
        match message:
            case codec.Renewal():
                self.feed(lease.shell, message.progress)
                lease.stream.send(codec.encode_push(Acked(message.clock_s)))
            case Ask() | Incomplete():
                self._asked(lease.shell, lease, message)
            case Left():
                lease.left = True
                self.feed(lease.shell, message)
            case _:
                raise ProtocolError("a lease has one Hello only")

    def _open(self, shell: RoomShell, hello: Hello, stream: Stream) -> Lease | FaultToleranceError:
        self._generation += 1
        hello = replace(
            hello,
            generation=self._generation,
            liveness_s=self.liveness_s,
            signature_lines=self._share_signature(hello.signature, hello.signature_lines),
        )
        now = self.now()
        self._notice_stall(now)
        self._perform(shell, self._decide(shell, (), now))
        effects = self._decide(shell, (hello,), now)
        mine = (effect for effect in effects if isinstance(effect, Refuse) and effect.to == hello.replica_id)
        refusal = next(mine, None)
        if refusal is not None:
            # Meant for this stream only: another lease may be registered under the same replica_id.
            self.say(shell, f"refused {refusal.to}: {refusal.reason}")
            self._perform(shell, [effect for effect in effects if effect is not refusal])
            self._arm(shell)
            return _refusal(refusal)
        lease = Lease(hello.replica_id, stream, shell=shell, generation=hello.generation)
        self._enter(lease, shell.leases, hello.replica_id)
        self._lease_opened()
        peers = peers_of(shell.room.current, shell.room.last_quorum, shell.room.records, hello.replica_id)
        stream.send(codec.encode_push(Welcome(self.liveness_s, peers, self._boot)))
        self._perform(shell, effects)
        self._arm(shell)
        return lease

    def _ended(self, lease: Lease) -> None:
        if lease.left or self._beat_timer is None:
            return
        now, shell = self.now(), lease.shell
        self.feed(shell, LeaseEnded(lease.name, lease.generation, lease.stream.silence_s))
        while shell.ends and now - shell.ends[0] > TURBULENCE_S:
            shell.ends.popleft()
        shell.ends.append(now)
        ended = len(shell.ends)
        if ended >= TURBULENCE_LEASES and ended > len(shell.leases) and now >= shell.turbulent_until:
            shell.turbulent_until = now + self.settings.boot_window_s / 2
            self.feed(shell, Turbulence())

    def _asked(self, shell: RoomShell, lease: Lease, ask: Ask | Incomplete) -> None:
        if not shell.asks:
            asyncio.get_running_loop().call_soon(self.feed, shell)
        if isinstance(ask, Ask) and ask.signature_lines:
            ask = replace(ask, signature_lines=self._share_signature(ask.signature, ask.signature_lines))
        shell.asks.append(Asked(ask, lease.generation) if isinstance(ask, Ask) else ask)
        lease.told = ("", 0.0)
        self._explain_soon(shell)

    def _explain_soon(self, shell: RoomShell) -> None:
        if shell.reason_timer is None:
            shell.reason_timer = asyncio.get_running_loop().call_later(REASON_S, self._explain, shell)

    def _explain(self, shell: RoomShell) -> None:
        """Tell everybody who asks why there is no quorum yet, if they have not heard it; log it once."""
        shell.reason_timer = None
        reason = shell.room.reason
        if not reason:
            return
        asking = [i for i, record in shell.room.records.items() if record.ask is not None]
        held, until = shell.room.held, shell.room.paused_until
        left_s = max(0.0, until - self.now())
        data = {text: codec.encode_push(Reason(text, left_s)) for text in {reason, *held.values()}}
        for replica_id in asking:
            lease, text = shell.leases.get(replica_id), held.get(replica_id, reason)
            if lease is not None and lease.told != (text, until):
                lease.told = text, until
                lease.stream.send(data[text])
        if asking and reason != shell.said:
            shell.said = reason
            self.say(shell, f"no quorum yet: {reason}")
            self._events.explained(shell.room)

    def _share_signature(self, signature: int, lines: tuple[str, ...]) -> tuple[str, ...]:
        """Equal signatures are kept once, not per replica (they are the largest thing a trainer sends)."""
        if not lines:
            return self._signatures.get(signature, ())
        known = self._signatures.get(signature)
        if known == lines:
            return known
        if len(self._signatures) >= MAX_SIGNATURES:
            self._signatures.pop(next(iter(self._signatures)))
        self._signatures[signature] = lines
        return lines


def _refusal(effect: Refuse) -> FaultToleranceError:
    return (JobFinishedError if effect.finished else StateLostError if effect.lost else RefusedError)(effect.reason)
