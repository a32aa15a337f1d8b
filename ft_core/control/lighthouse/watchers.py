"""Those who watch the lighthouse: each is sent what it knows of the groups it names, when that has changed.

How it works. A watcher is one call of `Watch`, on which answers like those of `Status` arrive: the first one at once,
others when a decision has changed something that counts, and at the latest after `STATUS_S` (the step and phase of a
group change all the time). What is sent is made when it is sent: who reads slowly gets fewer, newer answers, and
nothing is queued for it.

A decision that changes something wakes all watchers in the very moment in which members wait for their quorum, so they
are answered one after the other, SPREAD_S per watcher; the more there are, the less often each is told of mere steps
(TOLD_PER_S for all together). One of a few is answered at once.

Invariants: at most MAX_WATCHERS. Everything runs on the server's one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

from ft_core.errors import FaultToleranceError
from ft_core.rpc import codec
from ft_core.rpc.channel import grpc
from ft_core.rpc.codec import pb

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ft_core.control.lighthouse.room_host import Rooms
    from ft_core.rpc.stream_host import Context

MAX_WATCHERS = 4096
STATUS_S = 0.5
"""How often a watcher learns of progress, while there are few."""
TOLD_PER_S = 500
"""Answers per second, to all of them together, about nothing but progress."""
SPREAD_S = 0.0003
"""Between the answers to two watchers after the same decision: more than one costs."""
TURNS = 1024


class Watchers:
    """The watchers of one lighthouse.

    Args:
        rooms: what they look at.
        status: what `Status` would answer.
    """

    def __init__(self, rooms: Rooms, status: Callable[[pb.StatusRequest], pb.StatusResponse]) -> None:
        self._rooms = rooms
        self._status = status
        self._wakes: set[asyncio.Event] = set()
        self._turns = itertools.cycle(range(TURNS))

    def __repr__(self) -> str:
        return f"Watchers({len(self._wakes)})"

    def changed(self) -> None:
        """A room has decided something."""
        for wake in self._wakes:
            wake.set()

    async def serve(self, data: bytes, context: Context) -> None:
        """Handler of `Watch`."""
        await self._rooms.refuse_token(context)
        try:
            request = codec.decode_unary(pb.StatusRequest, data)
        except FaultToleranceError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, codec.clip(str(error)))
        if len(self._wakes) >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch this lighthouse already")
        wake = asyncio.Event()
        self._wakes.add(wake)
        try:
            await self._serve(request, wake, context)
        finally:
            self._wakes.discard(wake)

    async def _serve(self, request: pb.StatusRequest, wake: asyncio.Event, context: Context) -> None:
        now = asyncio.get_running_loop().time
        turn = next(self._turns)
        told: Hashable = None
        told_at = 0.0
        while True:
            wake.clear()
            await self._rooms.refuse_token(context)  # the other lighthouse of a pair may serve from now on
            answer = self._status(request)
            counts, due = _what_counts(answer), told_at + max(STATUS_S, len(self._wakes) / TOLD_PER_S)
            if counts != told or now() >= due:
                told, told_at = counts, now()
                await context.write(codec.encode_unary(answer))
                due = told_at + max(STATUS_S, len(self._wakes) / TOLD_PER_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(wake.wait(), max(0.0, due - now()))
            if wake.is_set():
                await asyncio.sleep(SPREAD_S * min(turn, len(self._wakes) - 1))


def _what_counts(answer: pb.StatusResponse) -> Hashable:
    """What a watcher is told of at once."""
    return tuple(
        (
            room.room, room.quorum_id, room.member_count, room.reason, room.closed, tuple(room.given_up),
            tuple((r.replica_id, r.life, r.member, r.committed, r.stalled) for r in room.replicas),
        )
        for room in answer.rooms
    )  # fmt: skip
