"""The lighthouse: a thin asyncio gRPC shell around `membership.Room`. Imports neither torch nor anything heavy.

How it works. Each room is a `membership.Room`, which decides, and a `_RoomShell`, which performs: it turns messages into
events, hands them to the room, and turns the effects into pushes over the open lease streams. There is no tick: one timer
per room stands at `room.next_at` and is set anew after every event. Everything runs on one event loop in one thread
(`serving.LoopServer`); nothing is awaited between an event and the last of its effects.

A lease is one stream with a generation (a counter of this server); only the newest generation of a replica is registered.
When it ends, the room is told for how long it had been silent, which tells a closed connection from missed keepalives.

R15, turbulence. If most leases of a room (and at least TURBULENCE_LEASES) end within TURBULENCE_S, or this process itself
stood still for longer than the liveness timeout, suspicions prove nothing; the rooms are told before anything else.
Standing still is noticed by a beat, which runs only while there are leases.

Invariants: rooms, leases, waiting calls and every outgoing queue are bounded; a lease's handler is the only one to end it;
what a client sends never ends anybody else's lease.

`LighthouseServer` runs it on a thread for tests and embedding, `main` is the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import logging.handlers
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ft_core import wire
from ft_core._pb import coordination_pb2 as pb
from ft_core.errors import ConfigError, FaultToleranceError, JobFinishedError, ProtocolError, RefusedError
from ft_core.membership import (
    Announce,
    Asked,
    ChangePending,
    Effect,
    Ended,
    Event,
    Explain,
    Hello,
    LeaseEnded,
    Left,
    MemberLost,
    Note,
    Paused,
    Progress,
    QuorumIds,
    Refuse,
    Reopen,
    Room,
    Superseded,
    Tick,
    Turbulence,
)
from ft_core.quorum import Ask, Life, Quorum, Version
from ft_core.rpc import (
    LIGHTHOUSE,
    Tls,
    grpc,
    join_host,
    reachable_host,
    release,
    server_options,
    split_bind,
    token_metadata,
    token_refusal,
)
from ft_core.serving import LoopServer, Stream, StreamDropped
from ft_core.settings import LighthouseSettings

MAX_ROOMS = 64
MAX_WAITING = 4096
"""Unary Quorum calls that wait at the same time."""
MAX_LAYOUTS = 64
DEFAULT_ROOM = "default"
DEFAULT_LIVENESS_S = 1.0
HELLO_S = 5.0
"""How long an opened stream may take to send its Hello."""
REASON_S = 0.2
"""A reason is told once it has stood for this long: while 256 groups arrive, it changes with every one of them."""
TURBULENCE_S = 0.05
TURBULENCE_LEASES = 3
EPOCH_2020_S = 1_577_836_800

_log = logging.getLogger("ft_core.lighthouse")
_Context = grpc.aio.ServicerContext[bytes, bytes]


@dataclass
class _Lease:
    replica_id: str
    generation: int
    stream: Stream
    told: str = ""
    """The last reason it was sent."""


@dataclass
class _Waiter:
    """A unary Quorum call."""

    seq: int
    done: asyncio.Future[Quorum]


@dataclass
class _RoomShell:
    room: Room
    leases: dict[str, _Lease] = field(default_factory=dict)
    waiters: dict[str, _Waiter] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    reason_timer: asyncio.TimerHandle | None = None
    asks: list[Asked] = field(default_factory=list)
    """Asks that arrived in this turn of the loop: handed to the room together, which then decides once."""
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    turbulent_until: float = 0.0
    said: str = ""
    """The last reason that was logged."""


class Lighthouse:
    """The state and the handlers. Used on one event loop; `bind_loop` is called there before anything else."""

    def __init__(self, settings: LighthouseSettings, liveness_s: float) -> None:
        self._settings = settings
        self._liveness_s = liveness_s
        self._rooms: dict[str, _RoomShell] = {}
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._generation = 0
        self._leases = 0
        self._seq = 0
        self._boot = secrets.randbits(63)
        entropy = deque(secrets.randbits(16) for _ in range(256))
        self._ids = QuorumIds(max(1, int(time.time()) - EPOCH_2020_S), secrets.randbits(16), entropy)
        # Rooms are told wall-clock seconds that never jump: the loop's clock plus a constant.
        self._offset = time.time() - time.monotonic()
        self._started = self._now()
        self._beat_at = self._started
        self._beat_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Lighthouse(rooms={len(self._rooms)}, leases={self._leases}, liveness={self._liveness_s:g} s)"

    def handlers(self) -> Mapping[str, Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]]:
        """What to register with the gRPC server."""
        unary = grpc.unary_unary_rpc_method_handler
        return {
            LIGHTHOUSE: {
                "Lease": grpc.stream_stream_rpc_method_handler(self._lease),
                "Quorum": unary(self._quorum),
                "Heartbeat": unary(self._heartbeat),
                "Status": unary(self._status),
                "Report": unary(self._report),
                "Drain": unary(self._drain),
                "Kill": unary(self._kill),
                "Reopen": unary(self._reopen),
            }
        }

    def close(self) -> None:
        """Cancel all timers."""
        for shell in self._rooms.values():
            for timer in (shell.timer, shell.reason_timer):
                if timer is not None:
                    timer.cancel()
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None

    # ------------------------------------------------------------ rooms

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _room(self, name: str) -> _RoomShell:
        shell = self._rooms.get(name)
        if shell is None:
            if len(self._rooms) >= MAX_ROOMS:
                idle = next((n for n, s in self._rooms.items() if not s.room.records and not s.room.closed), None)
                if idle is None:
                    raise RefusedError(
                        f"this lighthouse already serves {MAX_ROOMS} rooms; start another one for {name!r}"
                    )
                del self._rooms[idle]
            shell = self._rooms[name] = _RoomShell(Room(name, self._settings, self._ids, boot_at=self._started))
        return shell

    def _feed(self, shell: _RoomShell, *events: Event) -> list[Effect]:
        """Hand events to a room (after the asks that came before them), perform what follows, set its timer."""
        now = self._now()
        self._notice_stall(now)
        asks, shell.asks = shell.asks, []
        effects = shell.room.handle_all((*asks, *events), now)
        self._perform(shell, effects)
        self._arm(shell)
        return effects

    def _arm(self, shell: _RoomShell) -> None:
        if shell.timer is not None:
            shell.timer.cancel()
            shell.timer = None
        if shell.room.next_at is not None:
            when = shell.room.next_at - self._offset
            shell.timer = asyncio.get_running_loop().call_at(when, self._on_timer, shell)

    def _on_timer(self, shell: _RoomShell) -> None:
        shell.timer = None
        self._feed(shell, Tick())

    def _perform(self, shell: _RoomShell, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Announce():
                    self._announce(shell, effect)
                case Explain():
                    self._explain_soon(shell)
                case ChangePending():
                    self._push(shell, effect.to, wire.Change(effect.quorum_id, effect.reason))
                case MemberLost():
                    self._push(shell, effect.to, wire.Lost(effect.quorum_id, effect.lost))
                case Paused():
                    self._push(shell, effect.to, wire.Busy(effect.quorum_id, effect.replica_id, effect.for_s))
                case Superseded():
                    self._push(shell, (effect.to,), wire.Over(effect.quorum_id))
                case Note():
                    self._say(shell, effect.text)
                case Refuse():
                    self._say(shell, f"refused {effect.to}: {effect.reason}")

    def _announce(self, shell: _RoomShell, effect: Announce) -> None:
        shell.said = ""
        shared = wire.encode_quorum(effect.quorum)
        for replica_id, seq in effect.to:
            lease = shell.leases.get(replica_id)
            waiter = shell.waiters.get(replica_id)
            if lease is not None:
                lease.stream.send(wire.answer(seq, shared))
            elif waiter is not None and waiter.seq == seq and not waiter.done.done():
                waiter.done.set_result(effect.quorum)

    @staticmethod
    def _push(shell: _RoomShell, to: Sequence[str], push: wire.Push) -> None:
        data = wire.encode_push(push)
        for replica_id in to:
            lease = shell.leases.get(replica_id)
            if lease is not None:
                lease.stream.send(data)

    @staticmethod
    def _say(shell: _RoomShell, text: str) -> None:
        where = "" if shell.room.name == DEFAULT_ROOM else f"[{shell.room.name}] "
        _log.info("%s%s", where, text)

    # ------------------------------------------------------------ standing still

    def _beat(self) -> None:
        now = self._now()
        self._notice_stall(now)
        self._beat_at = now
        self._beat_timer = None
        if self._leases:
            self._beat_timer = asyncio.get_running_loop().call_later(self._liveness_s / 4, self._beat)

    def _notice_stall(self, now: float) -> None:
        """Frozen for longer than the liveness timeout: every lease may be about to end through no fault of its own."""
        stood_still_s = now - self._beat_at
        if self._beat_timer is None or stood_still_s <= self._liveness_s:
            return
        self._beat_at = now
        _log.warning("the lighthouse itself stood still for %.1f s", stood_still_s)
        for shell in self._rooms.values():
            if shell.leases:
                asks, shell.asks = shell.asks, []
                self._perform(shell, shell.room.handle_all((Turbulence(), *asks), now))
                self._arm(shell)

    def _lease_opened(self) -> None:
        self._leases += 1
        if self._beat_timer is None:
            self._beat_at = self._now()
            self._beat()

    # ------------------------------------------------------------ leases

    async def _refuse_token(self, context: _Context) -> None:
        refusal = token_refusal(context.invocation_metadata(), self._settings.token, "the lighthouse")
        if refusal:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

    async def _lease(self, _requests: object, context: _Context) -> None:
        await self._refuse_token(context)
        stream = Stream(context, self._now())
        try:
            error = await self._serve_lease(stream)
            if error is not None:
                stream.send(wire.encode_push(wire.Refusal(error)))
                await stream.finish()
        except StreamDropped as dropped:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(dropped))
        finally:
            stream.stop()

    async def _serve_lease(self, stream: Stream) -> FaultToleranceError | None:
        """One lease from Hello to end. Returns why it is refused, if it is."""
        try:
            first = await asyncio.wait_for(stream.read(), HELLO_S)
            if first is None:
                return None
            opening = wire.decode_lease_request(first)
            if not isinstance(opening, wire.Opening):
                return ProtocolError("the first message of a lease must be a Hello")
            shell = self._room(opening.room)
        except (ProtocolError, RefusedError) as error:
            _log.info("refused a client: %s", error)
            return error
        except asyncio.TimeoutError:
            return ProtocolError(f"no Hello arrived within {HELLO_S:g} s")
        lease, refusal = self._open(shell, opening.hello, stream)
        if lease is None:
            return refusal
        left = False
        try:
            while True:
                data = await stream.read()
                if data is None:
                    return None
                stream.heard_at = self._now()
                message = wire.decode_lease_request(data, lease.replica_id, lease.generation)
                match message:
                    case wire.Renewal():
                        self._feed(shell, message.progress)
                        stream.send(wire.encode_push(wire.Acked(message.clock_s)))
                    case Ask():
                        self._asked(shell, lease, message)
                    case Left():
                        left = True
                        self._feed(shell, message)
                        stream.send(wire.encode_push(wire.Acked(0.0)))
                        await stream.finish()
                        return None
                    case _:
                        return ProtocolError("a lease has one Hello only")
        except ProtocolError as error:
            _log.info("refused %s: %s", lease.replica_id, error)
            return error
        finally:
            self._closed(shell, lease, left=left)

    def _open(
        self, shell: _RoomShell, hello: Hello, stream: Stream
    ) -> tuple[_Lease | None, FaultToleranceError | None]:
        self._generation += 1
        hello = replace(
            hello, generation=self._generation, liveness_s=self._liveness_s, layout_lines=self._share_layout(hello)
        )
        now = self._now()
        self._notice_stall(now)
        asks, shell.asks = shell.asks, []
        self._perform(shell, shell.room.handle_all(asks, now))
        effects = shell.room.handle(hello, now)
        refusal = next((effect for effect in effects if isinstance(effect, Refuse)), None)
        if refusal is not None:
            # Meant for this stream only: another lease may be registered under the same replica_id.
            self._perform(shell, effects)
            self._arm(shell)
            kind = JobFinishedError if refusal.finished else RefusedError
            return None, kind(refusal.reason)
        old = shell.leases.get(hello.replica_id)
        lease = _Lease(hello.replica_id, hello.generation, stream)
        shell.leases[hello.replica_id] = lease
        if old is not None:
            old.stream.drop("a newer stream of the same process took over")
        self._lease_opened()
        stream.send(wire.encode_push(wire.Welcome(self._liveness_s, self._peers(shell, hello.replica_id), self._boot)))
        self._perform(shell, effects)
        self._arm(shell)
        return lease, None

    def _closed(self, shell: _RoomShell, lease: _Lease, *, left: bool) -> None:
        self._leases -= 1
        if shell.leases.get(lease.replica_id) is not lease:
            return
        del shell.leases[lease.replica_id]
        if left or self._beat_timer is None:
            return
        now = self._now()
        self._feed(shell, LeaseEnded(lease.replica_id, lease.generation, now - lease.stream.heard_at))
        while shell.ends and now - shell.ends[0] > TURBULENCE_S:
            shell.ends.popleft()
        shell.ends.append(now)
        ended = len(shell.ends)
        if ended >= TURBULENCE_LEASES and ended > len(shell.leases) and now >= shell.turbulent_until:
            shell.turbulent_until = now + self._settings.boot_window_s / 2
            self._feed(shell, Turbulence())

    def _asked(self, shell: _RoomShell, lease: _Lease, ask: Ask) -> None:
        if not shell.asks:
            asyncio.get_running_loop().call_soon(self._feed, shell)
        shell.asks.append(Asked(ask, lease.generation))
        lease.told = ""
        self._explain_soon(shell)

    def _explain_soon(self, shell: _RoomShell) -> None:
        if shell.reason_timer is None:
            shell.reason_timer = asyncio.get_running_loop().call_later(REASON_S, self._explain, shell)

    def _explain(self, shell: _RoomShell) -> None:
        """Tell everybody who asks why there is no quorum yet, if they have not heard it; log it once."""
        shell.reason_timer = None
        reason = shell.room.reason
        if not reason:
            return
        asking = [i for i, record in shell.room.records.items() if record.ask is not None]
        data = wire.encode_push(wire.Reason(reason))
        for replica_id in asking:
            lease = shell.leases.get(replica_id)
            if lease is not None and lease.told != reason:
                lease.told = reason
                lease.stream.send(data)
        if asking and reason != shell.said:
            shell.said = reason
            self._say(shell, f"no quorum yet: {reason}")

    def _share_layout(self, hello: Hello) -> tuple[str, ...]:
        """Equal layouts are kept once, not per replica (they are the largest thing a Hello carries)."""
        known = self._layouts.get(hello.layout)
        if known is not None and (known == hello.layout_lines or not hello.layout_lines):
            return known
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.pop(next(iter(self._layouts)))
        self._layouts[hello.layout] = hello.layout_lines
        return hello.layout_lines

    @staticmethod
    def _peers(shell: _RoomShell, me: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
        current = shell.room.current
        if current is None:
            return ()
        asked = (
            {m.replica_id: m.heal_addresses for m in shell.room.last_quorum.members} if shell.room.last_quorum else {}
        )
        found = []
        for replica_id in current.members:
            record = shell.room.records.get(replica_id)
            if replica_id != me and record is not None and record.life is Life.UP:
                found.append((replica_id, record.hello.heal_addresses or asked.get(replica_id, ())))
        return tuple(found)

    # ------------------------------------------------------------ unary calls

    async def _unary(self, context: _Context, work: Callable[[], bytes]) -> bytes:
        await self._refuse_token(context)
        try:
            return work()
        except FaultToleranceError as error:
            await _abort(context, error)

    async def _quorum(self, data: bytes, context: _Context) -> bytes:
        await self._refuse_token(context)
        try:
            shell, waiter, replica_id = self._start_waiting(data)
        except FaultToleranceError as error:
            await _abort(context, error)
        try:
            quorum = await waiter.done
        except RefusedError as error:
            await _abort(context, error)
        finally:
            if shell.waiters.get(replica_id) is waiter:
                del shell.waiters[replica_id]
                if not waiter.done.done() or waiter.done.cancelled():
                    # The caller went away or ran out of time: its ask must not be answered by a quorum it will not join.
                    self._feed(shell, LeaseEnded(replica_id, 0, 0.0))
        return wire.encode_quorum_info(quorum)

    def _start_waiting(self, data: bytes) -> tuple[_RoomShell, _Waiter, str]:
        request = wire.decode_unary(pb.QuorumRequest, data)
        shell = self._room(request.room or DEFAULT_ROOM)
        if sum(len(s.waiters) for s in self._rooms.values()) >= MAX_WAITING:
            raise RefusedError(f"{MAX_WAITING} calls wait for a quorum already")
        replica_id = request.replica_id
        self._unary_alive(shell, replica_id, Version(request.step, 0))
        old = shell.waiters.pop(replica_id, None)
        if old is not None and not old.done.done():
            old.done.set_exception(RefusedError(f"a newer quorum call of {replica_id!r} took over"))
        self._seq += 1
        waiter = _Waiter(self._seq, asyncio.get_running_loop().create_future())
        shell.waiters[replica_id] = waiter
        current = shell.room.current
        ask = Ask(
            replica_id=replica_id, seq=self._seq, version=Version(request.step, 0),
            quorum_id=current.quorum_id if current and replica_id in current.members else 0,
            group_world_size=max(1, request.world_size), store_address=request.store_address, address=request.address,
            shrink_only=request.shrink_only, commit_failures=request.commit_failures, data=request.data,
        )  # fmt: skip
        self._feed(shell, Asked(ask, 0))
        return shell, waiter, replica_id

    def _unary_alive(self, shell: _RoomShell, replica_id: str, version: Version) -> None:
        """A client without a lease has called: it is alive now."""
        if replica_id in shell.leases:
            raise RefusedError(f"{replica_id!r} holds a lease already: give this client a replica_id of its own")
        record = shell.room.records.get(replica_id)
        if record is not None and record.life is Life.UP and not record.hello.leased:
            self._feed(shell, Progress(replica_id, 0, max(version.step, record.step), "", record.stable))
            return
        hello = Hello(replica_id, replica_id, 0, 0, leased=False, version=version, liveness_s=self._liveness_s)
        refusal = next((e for e in self._feed(shell, hello) if isinstance(e, Refuse)), None)
        if refusal is not None:
            raise (JobFinishedError if refusal.finished else RefusedError)(refusal.reason)

    async def _heartbeat(self, data: bytes, context: _Context) -> bytes:
        def work() -> bytes:
            request = wire.decode_unary(pb.HeartbeatRequest, data)
            self._unary_alive(self._room(request.room or DEFAULT_ROOM), request.replica_id, Version(0, 0))
            return wire.encode_unary(pb.HeartbeatResponse())

        return await self._unary(context, work)

    async def _report(self, data: bytes, context: _Context) -> bytes:
        def work() -> bytes:
            request = wire.decode_unary(pb.ReportRequest, data)
            known = 0
            for shell in self._chosen(request.room):
                if any(request.ended in (i, r.hello.name) for i, r in shell.room.records.items()):
                    known += 1
                    self._feed(shell, Ended(request.ended))
            return wire.encode_unary(pb.ReportResponse(rooms=known))

        return await self._unary(context, work)

    async def _drain(self, data: bytes, context: _Context) -> bytes:
        return await self._unary(context, lambda: self._order(data, kill=False))

    async def _kill(self, data: bytes, context: _Context) -> bytes:
        return await self._unary(context, lambda: self._order(data, kill=True))

    def _order(self, data: bytes, *, kill: bool) -> bytes:
        request = wire.decode_unary(pb.OrderRequest, data)
        if not self._settings.token:
            raise RefusedError("orders to replicas are only taken by a lighthouse that was started with FT_TOKEN")
        push = wire.encode_push(wire.Order(kill, request.reason))
        told = []
        for shell in self._chosen(request.room):
            for replica_id, lease in shell.leases.items():
                record = shell.room.records.get(replica_id)
                if request.replica in (replica_id, record.hello.name if record else ""):
                    lease.stream.send(push)
                    told.append(replica_id)
                    self._say(shell, f"{replica_id} is asked to {'exit' if kill else 'drain'}: {request.reason}")
        return wire.encode_unary(pb.OrderResponse(told=told))

    async def _reopen(self, data: bytes, context: _Context) -> bytes:
        def work() -> bytes:
            request = wire.decode_unary(pb.ReopenRequest, data)
            shell = self._rooms.get(request.room or DEFAULT_ROOM)
            was_closed = shell is not None and bool(shell.room.closed)
            if shell is not None and was_closed:
                self._feed(shell, Reopen())
                self._say(shell, "the room is open again")
            return wire.encode_unary(pb.ReopenResponse(was_closed=was_closed))

        return await self._unary(context, work)

    async def _status(self, data: bytes, context: _Context) -> bytes:
        def work() -> bytes:
            request = wire.decode_unary(pb.StatusRequest, data)
            now = self._now()
            answer = pb.StatusResponse(
                release=release(),
                uptime_ms=int((now - self._started) * 1000),
                liveness_ms=int(self._liveness_s * 1000),
                rooms=[_room_status(shell.room, now) for shell in self._chosen(request.room)],
            )
            return wire.encode_unary(answer)

        return await self._unary(context, work)

    def _chosen(self, room: str) -> list[_RoomShell]:
        return [shell for name, shell in self._rooms.items() if room in ("", name)]


def _room_status(room: Room, now: float) -> pb.RoomStatus:
    current = room.current
    members = current.members if current else ()
    return pb.RoomStatus(
        room=room.name,
        quorum_id=current.quorum_id if current else 0,
        members=members,
        reason=room.reason if any(r.ask is not None for r in room.records.values()) else "",
        closed=room.closed,
        replicas=[
            pb.ReplicaStatus(
                replica_id=replica_id,
                life=record.life.value,
                since_ms=max(0, int((now - record.since) * 1000)),
                step=max(record.step, 0),
                phase=record.phase,
                asking=record.ask is not None,
                member=replica_id in members,
                stable=pb.Version(step=record.stable.step, epoch=record.stable.epoch),
                paused_ms=max(0, int((record.paused_until - now) * 1000)),
            )
            for replica_id, record in sorted(room.records.items())
        ],
    )


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (JobFinishedError, grpc.StatusCode.ABORTED),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
)


async def _abort(context: _Context, error: Exception) -> NoReturn:
    """End a unary call with a refusal; `coordination` turns the code back into the error."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(code, wire.clip(str(error)))
    raise error


class LighthouseServer:
    """A lighthouse on a thread of its own. The constructor starts it.

    Args:
        bind: host:port to listen on; port 0 takes any free one.
        min_replicas: smallest quorum.
        join_timeout_ms: how long a forming quorum waits for replicas that are connected but have not asked.
        quorum_tick_ms: accepted for compatibility and unused: nothing here polls.
        heartbeat_timeout_ms: how long a client of the unary calls is believed alive after its last call.
        liveness_ms: unanswered keepalives for this long end a lease; None: FT_LIVENESS_S, else 1000.
        grace_ms: a closed lease that is not re-opened within this time is a death.
        boot_window_ms: how long after its start the lighthouse waits for groups that were running before it (R9).
        token: secret every call must carry; None: FT_TOKEN.
        tls: certificates; None: FT_TLS_CERT, FT_TLS_KEY, FT_TLS_CA.

    Raises:
        ConfigError: a value cannot work, or the address cannot be bound.
    """

    def __init__(
        self,
        bind: str = "[::]:0",
        min_replicas: int = 1,
        join_timeout_ms: int = 100,
        quorum_tick_ms: int = 100,  # noqa: ARG002
        heartbeat_timeout_ms: int = 5000,
        *,
        liveness_ms: int | None = None,
        grace_ms: int = 100,
        boot_window_ms: int = 500,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        host, port = split_bind(bind, "bind")
        settings = LighthouseSettings(
            min_replicas=min_replicas,
            join_timeout_s=join_timeout_ms / 1000,
            heartbeat_timeout_s=heartbeat_timeout_ms / 1000,
            boot_window_s=boot_window_ms / 1000,
            grace_s=grace_ms / 1000,
            token=os.environ.get("FT_TOKEN", "") if token is None else token,
        )
        settings.check()
        token_metadata(settings.token)
        liveness_s = _liveness(liveness_ms)
        if settings.grace_s > liveness_s:
            raise ConfigError(f"grace_ms={grace_ms} must not be above liveness_ms={liveness_s * 1000:g}")
        tls = tls or Tls.from_env(os.environ)
        self._scheme = "http" if tls is None else "https"
        self._host = reachable_host(host)
        self._lighthouse = Lighthouse(settings, liveness_s)
        self._server = LoopServer("ft-lighthouse", server_options(liveness_s), tls)
        self._server.start(host, port, "bind", self._lighthouse.handlers())

    def __repr__(self) -> str:
        return f"LighthouseServer({self.address()}, {self._lighthouse!r})"

    def address(self) -> str:
        """http://host:port, with a host that other machines can use where this one's name allows."""
        return f"{self._scheme}://{join_host(self._host, self._server.port)}"

    def shutdown(self) -> None:
        """End all leases and stop listening. Idempotent; takes at most a few seconds."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._server.call(self._lighthouse.close, 1.0)
        self._server.shutdown()


def _liveness(given_ms: int | None) -> float:
    if given_ms is not None:
        if given_ms <= 0:
            raise ConfigError(f"liveness_ms={given_ms} must be more than 0")
        return given_ms / 1000
    text = os.environ.get("FT_LIVENESS_S", "")
    try:
        value = float(text) if text else DEFAULT_LIVENESS_S
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise ConfigError(f"FT_LIVENESS_S={text!r} is not a positive number of seconds")
    return value


# ---------------------------------------------------------------- command line


class _DroppingHandler(logging.handlers.QueueHandler):
    """Never blocks the loop: a reader of stderr that stands still costs log lines, not leases."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)  # type: ignore[union-attr]


def _log_to_stderr() -> logging.handlers.QueueListener:
    lines: queue.Queue[logging.LogRecord] = queue.Queue(10_000)
    out = logging.StreamHandler()
    out.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d lighthouse: %(message)s", "%H:%M:%S"))
    logging.getLogger("ft_core").setLevel(logging.INFO)
    logging.getLogger().addHandler(_DroppingHandler(lines))
    listener = logging.handlers.QueueListener(lines, out)
    listener.start()
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ft-lighthouse", description="Coordinator of fault-tolerant training: knows who is alive, decides quorums."
    )

    def option(name: str, **more: object) -> None:
        spellings = [f"--{name}"] + ([f"--{name.replace('-', '_')}"] if "-" in name else [])
        parser.add_argument(*spellings, dest=name.replace("-", "_"), **more)  # type: ignore[arg-type]

    option("bind", default="[::]:29510", help="host:port to listen on (default %(default)s; port 0: any free one)")
    option("min-replicas", type=int, help="smallest quorum (default: FT_MIN_REPLICAS, else 1)")
    option("join-timeout-ms", type=int, default=100, help="wait for connected replicas that have not asked yet")
    option("heartbeat-timeout-ms", type=int, default=5000, help="clients without a lease live this long after a call")
    option("quorum-tick-ms", type=int, default=100, help="accepted and unused: nothing polls")
    option("liveness-ms", type=int, help="silence after which a replica is presumed frozen (FT_LIVENESS_S, else 1000)")
    option("grace-ms", type=int, default=100, help="time a closed connection has to come back")
    option(
        "boot-window-ms",
        type=int,
        default=500,
        help="time running groups have to return after a restart of this server",
    )
    parser.add_argument("--version", action="version", version=f"ft-lighthouse {release()}")
    return parser


def _min_replicas(given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get("FT_MIN_REPLICAS", "") or "1"
    if not text.isdigit():
        raise ConfigError(f"FT_MIN_REPLICAS={text!r} is not a whole number")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a lighthouse until SIGTERM or SIGINT. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    listener = _log_to_stderr()
    try:
        server = LighthouseServer(
            arguments.bind,
            _min_replicas(arguments.min_replicas),
            arguments.join_timeout_ms,
            arguments.quorum_tick_ms,
            arguments.heartbeat_timeout_ms,
            liveness_ms=arguments.liveness_ms,
            grace_ms=arguments.grace_ms,
            boot_window_ms=arguments.boot_window_ms,
        )
    except ConfigError as error:
        print(f"ft-lighthouse: {error}", file=sys.stderr)
        return 2
    finally:
        if sys.exc_info()[0] is not None:
            listener.stop()
    print(f"ft-lighthouse listens on {server.address()}", flush=True)
    stop.wait()
    server.shutdown()
    listener.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
