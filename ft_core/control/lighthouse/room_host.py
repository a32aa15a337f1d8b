"""The lighthouse's rooms and leases: performs what `room.Room` decides.

How it works. Each room is a `room.Room`, which decides, and a `RoomShell`, which holds what is needed to perform:
messages become events, effects become pushes over the open lease streams. There is no tick: one timer per room stands
at `room.next_at` and is set anew after every event. Nothing is awaited between an event and the last of its effects.

A lease is one stream with a generation (a counter of this server); only the newest of a replica is registered. When it
ends, the room is told for how long it had been silent: that tells a closed connection from missed keepalives.

A decision looks at every replica, so what a thousand of them report within a moment is decided about together: asks
that arrive in one turn of the loop, and in large rooms everything that comes soon after the last decision (`pace`). A
message to all is encoded once; a reason is told once it has stood for REASON_S.

R15, turbulence. If most leases of a room (at least TURBULENCE_LEASES) end within TURBULENCE_S, or this process stood
still for longer than the liveness timeout (noticed by a beat, while there are leases), the rooms are told first.

Invariants: rooms, signatures and every outgoing queue are bounded; what a client sends never ends anybody else's lease.
Everything runs on the server's one loop; the streams are `rpc.stream_host`'s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.access import Tokens
from ft_core.control.lighthouse.deliveries import announce, end_all, push, refusal_of, refuse
from ft_core.control.lighthouse.room_events import RoomEvents
from ft_core.control.lighthouse.room_shell import Lease, RoomShell
from ft_core.errors import FaultToleranceError, ProtocolError, RefusedError
from ft_core.events.event_log import SILENT
from ft_core.protocol.lighthouse import pace
from ft_core.protocol.lighthouse.events import (
    Announce,
    Asked,
    Effect,
    Event,
    Explain,
    Hello,
    Incomplete,
    LeaseEnded,
    Left,
    Note,
    PartnerIs,
    Progress,
    Propose,
    Refuse,
    Tick,
    Turbulence,
)
from ft_core.protocol.lighthouse.partner import ALONE
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.room_keeping import MAX_ROOMS, FinishedRooms, replaceable
from ft_core.protocol.lighthouse.room_view import peers_of
from ft_core.protocol.pushes import Acked, Reason, Welcome
from ft_core.protocol.quorum_ids import QuorumIds, boot_of
from ft_core.protocol.types import Ask
from ft_core.rpc import codec
from ft_core.rpc.channel import grpc
from ft_core.rpc.loop_server import StreamDropped
from ft_core.rpc.stream_host import StreamHost
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.control.lighthouse.other_lighthouse import OtherLighthouse
    from ft_core.events.event_log import Events
    from ft_core.protocol.lighthouse.partner import Told
    from ft_core.rpc.loop_server import Stream
    from ft_core.rpc.stream_host import Context
    from ft_core.settings import LighthouseSettings

MAX_SIGNATURES = 64
HELLO_S = 5.0
"""How long an opened stream may take to send its Hello."""
REASON_S = 0.2
"""A reason is told once it has stood for this long: while many groups arrive, it changes with every one of them."""
PEERS_MAX = 32
"""As many donors are named to a newcomer: more than it can copy from at the same time."""
COMING_S = 1.5
"""So long members may take to come from the other lighthouse: an attempt to connect there, and one to connect here."""
TURBULENCE_S = 0.05
TURBULENCE_LEASES = 3

_log = logging.getLogger("ft_core.lighthouse")


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
        self._boot = secrets.randbits(63)
        entropy = deque(secrets.randbits(16) for _ in range(256))
        self._ids = QuorumIds(boot_of(time.time()), secrets.randbits(16), entropy)
        self.partner: OtherLighthouse | None = None
        """The other lighthouse of a pair; None: this one is alone."""
        self._changed: Callable[[], None] = lambda: None
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

    def on_change(self, changed: Callable[[], None]) -> None:
        """Have this called after each decision of a room."""
        self._changed = changed

    # ------------------------------------------------------------ rooms

    def now(self) -> float:
        """Wall-clock seconds that never jump: what rooms are told."""
        return time.monotonic() + self._offset

    def room(self, name: str) -> RoomShell:
        """A room, made if there is none of that name. Raises RefusedError if there are too many."""
        shell = self._rooms.get(name)
        if shell is None:
            told = self.partner.known(name) if self.partner is not None else ()
            if len(self._rooms) >= MAX_ROOMS:
                self._make_place(name)
            closed = max([self._finished.take(name), *((t.closed, t.finished) for t in told)])
            room = Room(name, self.settings, self._ids, boot_at=self._forgot_at, closed=closed, told=told)
            shell = self._rooms[name] = RoomShell(room)
            if self.partner is not None:
                self.partner.is_made(shell)
        return shell

    # ------------------------------------------------------------ one of a pair (R22)

    async def check_token(self, context: Context) -> None:
        """End a call that does not carry the token."""
        await super().refuse_token(context)

    async def refuse_token(self, context: Context) -> None:
        """End a call that does not carry the token, or that the other lighthouse of a pair has to serve."""
        await self.check_token(context)
        if self.partner is not None and not self.partner.serves:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.partner.refusal)

    def begin(self) -> None:
        """Serve: rooms know of the time before what the other lighthouse has told, and wait for those on their way."""
        self._forgot_at = self.now() + max(0.0, COMING_S - self.settings.boot_window_s)

    def stop_serving(self, why: str) -> list[Told]:
        """End all streams and calls, and drop the rooms. Returns what these knew."""
        rooms, self._rooms = self._rooms, {}
        for shell in rooms.values():
            shell.room.take((PartnerIs(ALONE),), self.now())  # what it has proposed will never be announced
            shell.stop()
            end_all(shell, why)
        self._changed()
        return [shell.room.told for shell in rooms.values()]

    def _make_place(self, name: str) -> None:
        """Forget a room, for the one called `name`."""
        now = self.now()
        idle = {n: shell.room for n, shell in self._rooms.items() if not shell.leases and not shell.waiters}
        over = replaceable(idle, now, self.liveness_s + self.settings.boot_window_s)
        if not over:
            raise RefusedError(f"all of {MAX_ROOMS} rooms here have living replicas: start a lighthouse for {name!r}")
        (shell := self._rooms.pop(over)).stop()
        self._finished.remember(shell.room)
        if self.partner is not None:
            self.partner.keeps(shell.room)
        if shell.room.current is not None and not shell.room.closed:
            self._forgot_at = now  # whoever returns finds a lighthouse that knows no quorum, as after a restart (R9)

    def chosen(self, name: str) -> list[RoomShell]:
        """The room of that name; all rooms for ''."""
        return [shell for known, shell in self._rooms.items() if name in ("", known)]

    def feed(self, shell: RoomShell, *events: Event) -> list[Effect]:
        """Hand events to a room; decide what follows now, or soon if it has just decided. Returns what followed now."""
        if self._rooms.get(shell.room.name) is not shell:
            return []  # dropped when this lighthouse began to stand by: its streams end only now
        now = self.now()
        self._notice_stall(now)
        effects = self._take(shell, events, now)
        if shell.decision is None or now < self._rested_at(shell):
            return effects
        return effects + self._settle(shell, now)

    def _take(self, shell: RoomShell, events: Sequence[Event], now: float) -> list[Effect]:
        """Hand a room events, and perform what follows at once."""
        effects = shell.room.take(events, now)
        shell.taken += [event for event in events if not isinstance(event, Progress)]
        shell.effects += effects
        self._perform(shell, effects)
        if shell.room.unsettled:
            self._settle_soon(shell)
        else:
            self._arm(shell)
        return effects

    def _rested_at(self, shell: RoomShell) -> float:
        """When the next decision may be made."""
        return shell.decided_at + pace.rest_s(len(shell.room.records))

    def _settle_soon(self, shell: RoomShell) -> None:
        """Decide at the end of this turn of the loop, or as soon as the room has rested."""
        if shell.decision is None:
            when = self._rested_at(shell)
            loop = asyncio.get_running_loop()
            if when <= self.now():
                shell.decision = loop.call_soon(self._settle, shell)
            else:
                shell.decision = loop.call_at(when - self._offset, self._settle, shell)

    def _settle(self, shell: RoomShell, now: float | None = None) -> list[Effect]:
        """Decide what follows from all that a room has taken, perform it, set its timer."""
        now = self.now() if now is None else now
        if shell.decision is not None:
            shell.decision.cancel()
            shell.decision = None
        effects = shell.room.settle(now) if shell.room.unsettled else []
        taken, before = shell.taken, shell.effects
        shell.taken, shell.effects = [], []
        self._events.fed(shell.room, taken, before + effects, now)
        self._perform(shell, effects)
        if self.partner is not None:
            self.partner.decided(shell)
        self._changed()
        shell.decided_at = self.now()
        self._arm(shell)
        return effects

    def _arm(self, shell: RoomShell) -> None:
        """Set the timer to when the room wants to look again, if no decision is coming anyway."""
        at = shell.room.next_at if shell.decision is None else None
        if shell.timer is not None:
            if at == shell.timer_at:
                return
            shell.timer.cancel()
            shell.timer = None
        if at is not None:
            shell.timer_at = at
            shell.timer = asyncio.get_running_loop().call_at(at - self._offset, self._on_timer, shell)

    def _on_timer(self, shell: RoomShell) -> None:
        shell.timer = None
        self.feed(shell, Tick())

    def _perform(self, shell: RoomShell, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Announce():
                    announce(shell, effect)
                case Explain():
                    self._explain_soon(shell)
                case Propose():
                    assert self.partner is not None
                    self.partner.propose(effect.proposal)
                case Note():
                    self.say(shell, effect.text)
                case Refuse():
                    self.say(shell, f"refused {effect.to}: {effect.reason}")
                    refuse(shell, effect)
                case _:
                    push(shell, effect)

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
                self._take(shell, (Turbulence(),), now)

    def _lease_opened(self) -> None:
        if self._beat_timer is None:
            self._beat_at = self.now()
            self._beat()

    # ------------------------------------------------------------ leases

    def _let_in(self, first: bytes, stream: Stream) -> Lease | FaultToleranceError:
        opening = codec.decode_lease_request(first)
        if not isinstance(opening, codec.Opening):
            raise ProtocolError("the first message of a lease must be a Hello")
        if self.partner is not None and not self.partner.serves:  # since the stream was opened
            raise StreamDropped(self.partner.refusal)
        return self._open(self.room(opening.room), opening.hello, stream)

    def _received(self, lease: Lease, data: bytes) -> None:
        message = codec.decode_lease_request(data, lease.name, lease.generation)
        match message:
            case codec.Renewal():
                now = self.now()
                self._notice_stall(now)
                self._take(lease.shell, (message.progress,), now)
                leases, number = len(self._callers), lease.renewals
                lease.renewals = number + 1
                if pace.is_acknowledged(leases, number):
                    ack = Acked(message.clock_s, renew_s=pace.renewal_s(leases, self.liveness_s))
                    lease.stream.send(codec.encode_push(ack))
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
        effects = shell.room.take((hello,), now)
        shell.taken.append(hello)
        shell.effects += effects
        self._settle_soon(shell)
        mine = (effect for effect in effects if isinstance(effect, Refuse) and effect.to == hello.replica_id)
        refusal = next(mine, None)
        if refusal is not None:
            # Meant for this stream only: another lease may be registered under the same replica_id.
            self.say(shell, f"refused {refusal.to}: {refusal.reason}")
            self._perform(shell, [effect for effect in effects if effect is not refusal])
            return refusal_of(refusal)
        lease = Lease(hello.replica_id, stream, shell=shell, generation=hello.generation)
        self._enter(lease, shell.leases, hello.replica_id)
        self._lease_opened()
        peers = peers_of(shell.room.current, shell.room.last_quorum, shell.room.records, hello.replica_id, PEERS_MAX)
        stream.send(codec.encode_push(Welcome(self.liveness_s, peers, self._boot, self.partner is not None)))
        self._perform(shell, effects)
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
        if isinstance(ask, Ask) and ask.signature_lines:
            ask = replace(ask, signature_lines=self._share_signature(ask.signature, ask.signature_lines))
        now = self.now()
        self._notice_stall(now)
        self._take(shell, (Asked(ask, lease.generation) if isinstance(ask, Ask) else ask,), now)
        lease.told = ("", 0.0)
        self._explain_soon(shell)

    def _explain_soon(self, shell: RoomShell) -> None:
        if shell.reason_timer is None:
            shell.reason_timer = asyncio.get_running_loop().call_later(REASON_S, self._explain, shell)

    def _explain(self, shell: RoomShell) -> None:
        """Tell everybody who asks why there is no quorum yet, if they have not heard it; log it once."""
        shell.reason_timer = None
        reason = shell.room.waits.reason
        if not reason:
            return
        asking = [i for i, record in shell.room.records.items() if record.ask is not None]
        held, until = shell.room.waits.held, shell.room.waits.paused_until
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
