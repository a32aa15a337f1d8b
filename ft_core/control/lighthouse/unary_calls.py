"""The lighthouse's unary calls: for clients without a lease, for supervisors, operators and tools.

How it works. A client of Quorum and Heartbeat has no lease; to its room it looks as if it had: its first call is the
Hello, and heartbeat_timeout_s after its last call has ended a timer here sends the goodbye. Its ask lives as long as
its call: if the caller goes away or runs out of time, it is treated like a lease that was closed. Everything else looks
something up or feeds one event to the rooms. Runs on the loop of `room_host.Rooms`.

Invariants: at most MAX_WAITING calls wait; one call per replica_id, a newer one takes over; one timer per client that
its room takes for alive and that does not wait in a call.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from ft_core.control.lighthouse.orders import send_order
from ft_core.control.lighthouse.room_host import Rooms
from ft_core.control.lighthouse.room_shell import RoomShell, Waiter
from ft_core.control.lighthouse.watchers import Watchers
from ft_core.errors import FaultToleranceError, JobFinishedError, LighthouseError, ProtocolError, RefusedError
from ft_core.protocol.lighthouse.events import Asked, Ended, GivenUp, Hello, LeaseEnded, Left, Progress, Refuse, Reopen
from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.types import VOID, Ask, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import QUORUM_ANSWER_S, grpc, release
from ft_core.rpc.codec import pb
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ft_core.control.lighthouse.room_host import Rooms
    from ft_core.protocol.lighthouse.events import Effect
    from ft_core.protocol.lighthouse.room import Room
    from ft_core.rpc.stream_host import Context

MAX_WAITING = 4096
"""Unary Quorum calls that wait at the same time."""


class Calls:
    """Handlers of the unary calls of one lighthouse.

    Args:
        rooms: what they look at and change.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._seq = 0
        self._silences: dict[tuple[str, str], asyncio.TimerHandle] = {}
        """By room and replica_id: when a client that makes no more calls is taken to have left."""
        self._watchers = Watchers(rooms, self._known)
        rooms.on_change(self._watchers.changed)

    def __repr__(self) -> str:
        return f"Calls(waiting={sum(len(shell.waiters) for shell in self._rooms.chosen(''))})"

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]:
        """The handlers to register with the gRPC server."""
        methods = {
            "Quorum": self._quorum, "Heartbeat": self._heartbeat, "Status": self._status, "Report": self._report,
            "Drain": self._drain, "Kill": self._kill, "Reopen": self._reopen,
        }  # fmt: skip
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
        }
        return {**handlers, "Watch": grpc.unary_stream_rpc_method_handler(self._watchers.serve)}

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._silences.values():
            timer.cancel()
        self._silences.clear()

    async def _unary(self, context: Context, work: Callable[[], bytes]) -> bytes:
        await self._rooms.refuse_token(context)
        try:
            return work()
        except FaultToleranceError as error:
            await _abort(context, error)

    async def _quorum(self, data: bytes, context: Context) -> bytes:
        await self._rooms.refuse_token(context)
        try:
            shell, waiter, replica_id = self._start_waiting(data)
        except FaultToleranceError as error:
            await _abort(context, error)
        try:
            quorum = await asyncio.wait_for(waiter.done, _patience(context))
        except (RefusedError, JobFinishedError) as error:
            await _abort(context, error)
        except LighthouseError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, shell.room.waits.reason)
            raise
        finally:
            if shell.waiters.get(replica_id) is waiter:
                del shell.waiters[replica_id]
                if waiter.done.done() and not waiter.done.cancelled():
                    self._await_next(shell, replica_id)
                else:
                    # The caller went away or ran out of time: its ask must not be answered by a quorum it will not
                    # join.
                    self._rooms.feed(shell, LeaseEnded(replica_id, 0, 0.0))
        return codec.encode_quorum_info(quorum)

    def _start_waiting(self, data: bytes) -> tuple[RoomShell, Waiter, str]:
        request = codec.decode_unary(pb.QuorumRequest, data)
        shell = self._rooms.room(request.room or DEFAULT_ROOM)
        if sum(len(s.waiters) for s in self._rooms.chosen("")) >= MAX_WAITING:
            raise RefusedError(f"{MAX_WAITING} calls wait for a quorum already")
        replica_id = request.replica_id
        self._unary_alive(shell, replica_id, Version(request.step, 0))
        self._stop_timer(shell, replica_id)
        old = shell.waiters.pop(replica_id, None)
        if old is not None and not old.done.done():
            old.done.set_exception(RefusedError(f"a newer quorum call of {replica_id!r} took over"))
        self._seq += 1
        waiter = Waiter(self._seq, asyncio.get_running_loop().create_future())
        shell.waiters[replica_id] = waiter
        current = shell.room.current
        ask = Ask(
            replica_id=replica_id, seq=self._seq, version=Version(request.step, 0),
            quorum_id=current.quorum_id if current and replica_id in current.among else 0,
            group_world_size=max(1, request.world_size), store_address=request.store_address, address=request.address,
            shrink_only=request.shrink_only, commit_failures=request.commit_failures, data=request.data,
            from_scratch=True, fenced=True,  # what a step is, and who was in it, is such a client's business
        )  # fmt: skip
        self._rooms.feed(shell, Asked(ask, 0))
        return shell, waiter, replica_id

    def _unary_alive(self, shell: RoomShell, replica_id: str, version: Version) -> None:
        """A client without a lease has called: it is alive now."""
        if replica_id in shell.leases:
            raise RefusedError(f"{replica_id!r} holds a lease already: give this client a replica_id of its own")
        record = shell.room.records.get(replica_id)
        if record is not None and record.life is Life.UP and record.hello.unary:
            self._rooms.feed(shell, Progress(replica_id, 0, max(version.step, record.step), "", record.stable))
            return
        hello = Hello(replica_id, replica_id, 0, 0, unary=True, version=version, liveness_s=self._rooms.liveness_s)
        refusal = _refusal_of(replica_id, self._rooms.feed(shell, hello))
        if refusal is not None:
            raise refusal

    def _stop_timer(self, shell: RoomShell, replica_id: str) -> None:
        timer = self._silences.pop((shell.room.name, replica_id), None)
        if timer is not None:
            timer.cancel()

    def _await_next(self, shell: RoomShell, replica_id: str) -> None:
        """Its call is over: without another one it will be taken to have left."""
        self._stop_timer(shell, replica_id)
        key, wait_s = (shell.room.name, replica_id), self._rooms.settings.heartbeat_timeout_s
        self._silences[key] = asyncio.get_running_loop().call_later(wait_s, self._on_silence, shell, replica_id)

    def _on_silence(self, shell: RoomShell, replica_id: str) -> None:
        del self._silences[shell.room.name, replica_id]
        why = f"no call came within {self._rooms.settings.heartbeat_timeout_s:g} s"
        self._rooms.feed(shell, Left(replica_id, 0, why, finished=False, version=VOID, agreed=False))

    async def _heartbeat(self, data: bytes, context: Context) -> bytes:
        def work() -> bytes:
            request = codec.decode_unary(pb.HeartbeatRequest, data)
            shell = self._rooms.room(request.room or DEFAULT_ROOM)
            self._unary_alive(shell, request.replica_id, Version(0, 0))
            if request.replica_id not in shell.waiters:
                self._await_next(shell, request.replica_id)
            return codec.encode_unary(pb.HeartbeatResponse())

        return await self._unary(context, work)

    async def _report(self, data: bytes, context: Context) -> bytes:
        def work() -> bytes:
            request = codec.decode_unary(pb.ReportRequest, data)
            known = 0
            if request.given_up:  # its processes may have ended before they reached any room
                self._rooms.feed(
                    self._rooms.room(request.room or DEFAULT_ROOM), GivenUp(request.ended, codec.clip(request.reason))
                )
                return codec.encode_unary(pb.ReportResponse(rooms=1))
            for shell in self._rooms.chosen(request.room):
                if shell.room.called((request.ended,)):
                    known += 1
                    self._rooms.feed(shell, Ended(request.ended))
            return codec.encode_unary(pb.ReportResponse(rooms=known))

        return await self._unary(context, work)

    async def _drain(self, data: bytes, context: Context) -> bytes:
        return await self._ordered(data, context, kill=False)

    async def _kill(self, data: bytes, context: Context) -> bytes:
        return await self._ordered(data, context, kill=True)

    async def _ordered(self, data: bytes, context: Context, *, kill: bool) -> bytes:
        await self._rooms.refuse_token(context)
        await self._rooms.refuse_order(context)
        return await self._unary(context, lambda: self._order(data, kill=kill))

    def _order(self, data: bytes, *, kill: bool) -> bytes:
        request = codec.decode_unary(pb.OrderRequest, data)
        told = send_order(self._rooms, request.room, request.replica, request.reason, kill=kill)
        return codec.encode_unary(pb.OrderResponse(told=told))

    async def _reopen(self, data: bytes, context: Context) -> bytes:
        def work() -> bytes:
            request = codec.decode_unary(pb.ReopenRequest, data)
            shell = self._rooms.room(request.room or DEFAULT_ROOM)
            was_closed = bool(shell.room.closed)
            if was_closed:
                self._rooms.feed(shell, Reopen())
                self._rooms.say(shell, "the room is open again")
            return codec.encode_unary(pb.ReopenResponse(was_closed=was_closed))

        return await self._unary(context, work)

    async def _status(self, data: bytes, context: Context) -> bytes:
        def work() -> bytes:
            return codec.encode_unary(self._known(codec.decode_unary(pb.StatusRequest, data)))

        return await self._unary(context, work)

    def _known(self, request: pb.StatusRequest) -> pb.StatusResponse:
        now = self._rooms.now()
        return pb.StatusResponse(
            release=release(),
            uptime_ms=int((now - self._rooms.started) * 1000),
            liveness_ms=int(self._rooms.liveness_s * 1000),
            rooms=[room_status(shell.room, now, request.names) for shell in self._rooms.chosen(request.room)],
        )


def _refusal_of(replica_id: str, effects: Sequence[Effect]) -> RefusedError | JobFinishedError | None:
    """The error for a client that is refused by one of these effects."""
    refused = next((e for e in effects if isinstance(e, Refuse) and e.to == replica_id), None)
    if refused is None:
        return None
    return JobFinishedError(refused.reason) if refused.finished else RefusedError(refused.reason)


def _patience(context: Context) -> float | None:
    """How long to wait so that the reason for not answering still arrives before the caller's deadline."""
    left_s: float | None = context.time_remaining()  # the stubs forget that a call may have no deadline
    return None if left_s is None else max(left_s / 2, left_s - QUORUM_ANSWER_S)


def room_status(room: Room, now: float, names: Collection[str] = ()) -> pb.RoomStatus:
    """One room as it is; with `names`, only its replicas of these names."""
    current = room.current
    members = current.members if current else ()
    among = current.among if current else frozenset()
    shown = room.called(names) if names else room.records
    return pb.RoomStatus(
        room=room.name,
        quorum_id=current.quorum_id if current else 0,
        members=() if names else members,
        member_count=len(members),
        reason=room.waits.reason,
        closed=room.closed,
        given_up=room.expected.given_up,
        replicas=[
            pb.ReplicaStatus(
                replica_id=replica_id,
                life=record.life.value,
                since_ms=max(0, int((now - record.since) * 1000)),
                step=max(record.step, 0),
                phase=record.phase,
                asking=record.ask is not None,
                member=replica_id in among,
                stable=pb.Version(step=record.stable.step, quorum_id=record.stable.quorum_id),
                paused_ms=max(0, int((record.paused_until - now) * 1000)),
                committed=record.committed,
                stalled=record.stalled if record.life is Life.UP else "",
            )
            for replica_id, record in sorted(shown.items())
        ],
    )


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (JobFinishedError, grpc.StatusCode.ABORTED),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
)


async def _abort(context: Context, error: Exception) -> NoReturn:
    """End a unary call with a refusal; `coordination` turns the code back into the error."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(code, codec.clip(str(error)))
    raise error
