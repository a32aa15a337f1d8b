"""One control plane for all ranks of a replica group: they ask, vote, break and leave as one (R12).

How it works. Group rank 0 holds the lease with the lighthouse and serves the other ranks (`LeaderControl`, over a
`GroupServer`); each of them keeps one stream open to it (`RankControl`). What all ranks have to agree on is decided by
the pure `group.merge_asks` and `group.Votes`; the lighthouse's pushes are relayed to every rank as they come. A group of
one rank needs none of this: `LocalControl` goes straight to its lease and a vote is its own answer.

A rank that is broken, or whose stream ends and does not come back within the grace, breaks the group in that quorum: votes
on it are BROKEN, and every other rank hears `on_member_lost` with its own replica_id.

Threads: everything in `GroupServer` happens on its loop thread, including the calls to rank 0's handler, so that these
stay one at a time. The lease thread only posts to it. `vote` blocks the calling thread.

Invariants: votes are keyed (quorum_id, attempt), idempotent, and presented again after a reconnect; a break is told once
per quorum; what is remembered of quorums is bounded by MAX_BROKEN and group.MAX_OPEN_VOTES.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Protocol

from ft_core import wire
from ft_core.client import LeaseClient, LeaseHandler, LeaseSettings, Peers, StreamClient, deliver
from ft_core.errors import ConfigError, FaultToleranceError, ProtocolError, RefusedError
from ft_core.group import Mismatch, Votes, merge_asks
from ft_core.membership import Hello, Left, Progress
from ft_core.quorum import VOID, Ask, Quorum, Version
from ft_core.rpc import GROUP, Tls, grpc, join_host, reachable_host, release, server_options, token_refusal
from ft_core.serving import LoopServer, Stream, StreamDropped
from ft_core.step import Outcome, Verdict

MAX_BROKEN = 8
"""Quorums remembered as broken for this group."""
LATE_S = 1.0
"""After this long, ranks that have asked are told which ranks have not."""
FLUSH_S = 0.5
"""How long a leader that shuts down waits for its last messages to leave."""

_log = logging.getLogger(__name__)


class Control(Protocol):
    """One rank's view of the control plane, the same for all ranks of a group. Answers come through its LeaseHandler.

    On ranks > 0 only these handler methods are called: on_quorum, on_reason, on_change_pending, on_member_lost, on_paused,
    on_superseded, on_refused, on_drain, on_kill (hello and on_welcome only on group rank 0).
    """

    @property
    def last_ack(self) -> float:
        """time.monotonic() of the newest message acknowledged by the lighthouse, seen from this rank; -inf before."""

    @property
    def connected(self) -> bool:
        """This rank's way to the lighthouse is open (for ranks > 0: to group rank 0)."""

    @property
    def last_reason(self) -> str:
        """Why there is no quorum or no connection; '' if neither."""

    def start(self) -> None:
        """Begin to connect; returns at once."""

    def wait_connected(self, timeout_s: float) -> None:
        """Wait for the first connection. Raises LighthouseError, or what `on_refused` was told."""

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """This rank's part of the group's ask; the answer comes through `on_quorum(ask.seq, ...)`."""

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """The group's verdict; BROKEN if it is not known within `timeout_s` or a rank died."""

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """Note where training is; cheap."""

    def leave(self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float) -> bool:
        """Say goodbye; True if it was acknowledged."""

    def break_group(self, quorum_id: int, reason: str) -> None:
        """This rank is broken in `quorum_id`: tell the group's other ranks. Never blocks."""

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Close everything. Idempotent, bounded."""


class LocalControl(LeaseClient):
    """group_world_size == 1: the lease itself."""

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:  # noqa: ARG002
        """The group's verdict is this rank's."""
        return verdict

    def break_group(self, quorum_id: int, reason: str) -> None:
        """There is nobody else to tell."""


@dataclass
class _Rank:
    """One rank, as its leader sees it."""

    stream: Stream | None = None
    incarnation: int = 0
    left: bool = False
    grace: asyncio.TimerHandle | None = None
    answered: tuple[int, Quorum] | None = None
    paused_until: float = 0.0


class _Waiting:
    """Votes that threads of this process wait for: keyed like Votes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._verdicts: OrderedDict[tuple[int, int], Verdict] = OrderedDict()
        self._broken: OrderedDict[int, str] = OrderedDict()

    def decided(self, verdict: Verdict) -> None:
        """The group's verdict on an attempt is known; the first one stands."""
        with self._changed:
            self._verdicts.setdefault((verdict.quorum_id, verdict.attempt), verdict)
            while len(self._verdicts) > MAX_BROKEN:
                self._verdicts.popitem(last=False)
            self._changed.notify_all()

    def broke(self, quorum_id: int, reason: str) -> bool:
        """The group is broken in a quorum. True if that is new."""
        with self._changed:
            new = quorum_id not in self._broken
            self._broken.setdefault(quorum_id, reason)
            while len(self._broken) > MAX_BROKEN:
                self._broken.popitem(last=False)
            self._changed.notify_all()
            return new

    def result(self, quorum_id: int, attempt: int) -> Verdict | None:
        """A decided verdict outlives a later break (R0)."""
        verdict = self._verdicts.get((quorum_id, attempt))
        if verdict is None and quorum_id in self._broken:
            verdict = Verdict(quorum_id, attempt, Outcome.BROKEN, self._broken[quorum_id])
        return verdict

    def wait(self, verdict: Verdict, timeout_s: float, whose: str) -> Verdict:
        """Wait for the verdict on the attempt that `verdict` is a vote on."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (found := self.result(verdict.quorum_id, verdict.attempt)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    reason = f"the ranks of {whose} did not agree on the step within {timeout_s:g} s"
                    return Verdict(verdict.quorum_id, verdict.attempt, Outcome.BROKEN, reason)
                self._changed.wait(left)
            return found


class GroupServer:
    """Combines the ranks of one group; used by `LeaderControl` and `coordination.ManagerServer`.

    Args:
        settings: the group's lease settings.
        handler: of the rank that lives in this process, `local_rank`.
        world_size: number of ranks.
        host, port: what to listen on; port 0 takes a free one.
        local_rank: which rank calls in process; None: all ranks come over the network.
    """

    def __init__(
        self, settings: LeaseSettings, handler: LeaseHandler, *, world_size: int, host: str, port: int,
        local_rank: int | None = 0,
    ) -> None:  # fmt: skip
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        self.settings = settings
        self.local_rank = local_rank
        self.waiting = _Waiting()
        self.late = ""
        """Which ranks are waited for, once that takes long; '' otherwise."""
        self.fatal: Exception | None = None
        self._handler = handler
        self._world_size = world_size
        self._ranks = {rank: _Rank() for rank in range(world_size) if rank != local_rank}
        self._asks: dict[int, Ask] = {}
        self._room: str | None = None
        self._open: Ask | None = None
        """The group's ask that the lighthouse has not answered."""
        self._seq = 0
        self._local_answered: tuple[int, Quorum] | None = None
        self._votes = Votes(world_size)
        self._quorum_id = 0
        self._told_broken: OrderedDict[int, None] = OrderedDict()
        self._timers: set[asyncio.TimerHandle] = set()
        self._late_timer: asyncio.TimerHandle | None = None
        self._local_pause: tuple[int, str, Version, float] = (0, "", VOID, 0.0)
        self._stopping = False
        self.lease = LeaseClient(settings, _Relay(self, handler))
        self._server = LoopServer("ft-group", server_options(settings.budget.liveness_s), _tls(settings))
        self._server.start(
            host, port, "FT_MANAGER_PORT", {GROUP: {"Join": grpc.stream_stream_rpc_method_handler(self._join)}}
        )
        self.port = self._server.port

    def __repr__(self) -> str:
        here = sum(rank.stream is not None for rank in self._ranks.values())
        return f"GroupServer({self.settings.replica_id}, ranks={here}/{len(self._ranks)}, asked={len(self._asks)})"

    # ------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Open the lease, and begin to expect the other ranks."""
        self.lease.start()
        self._server.post(lambda: self._later(self.settings.budget.connect_s, self._missing))

    def post_ask(self, rank: int, ask: Ask, room: str | None) -> None:
        """A rank asks."""
        self._server.post(lambda: self._on_ask(rank, ask, room))

    def post_vote(self, rank: int, vote: Verdict) -> None:
        """A rank votes."""
        self._server.post(lambda: self._on_vote(rank, vote))

    def post_break(self, rank: int | None, quorum_id: int, reason: str) -> None:
        """A rank is broken."""
        self._server.post(lambda: self._on_break(rank, quorum_id, reason))

    def post_push(self, push: wire.Push) -> None:
        """The lighthouse says something."""
        self._server.post(lambda: self._on_push(push))

    def post_refused(self, error: Exception) -> None:
        """It is over for all ranks."""
        self._server.post(lambda: self._refuse(error))

    def shutdown(self, timeout_s: float) -> None:
        """End lease and server."""
        self.lease.shutdown(timeout_s)
        self._server.post(self._end)
        done = threading.Event()
        if self._server.post(lambda: self._flush(done)):
            done.wait(min(FLUSH_S, timeout_s))
        self._server.shutdown(timeout_s)

    # ------------------------------------------------------------ timers (loop)

    def _later(self, delay_s: float, work: object) -> asyncio.TimerHandle:
        handle = asyncio.get_running_loop().call_later(delay_s, work)  # type: ignore[arg-type]
        self._timers = {timer for timer in self._timers if not timer.cancelled() and timer.when() > time.monotonic()}
        self._timers.add(handle)
        return handle

    def _end(self) -> None:
        self._stopping = True
        for timer in self._timers:
            timer.cancel()

    def _flush(self, done: threading.Event) -> None:
        tasks = [asyncio.ensure_future(rank.stream.finish()) for rank in self._ranks.values() if rank.stream]
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        gathered.add_done_callback(lambda _: done.set())

    def _missing(self) -> None:
        absent = [str(number) for number, rank in self._ranks.items() if rank.incarnation == 0]
        if absent and not self._stopping:
            self._refuse(
                RefusedError(
                    f"group rank{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self.settings.replica_id} never "
                    f"connected to group rank 0 (port {self.port}) within connect_timeout="
                    f"{self.settings.budget.connect_s:g} s: start all {self._world_size} ranks (WORLD_SIZE) of the group, "
                    "and check that they can reach that port (FT_HOSTNAME, FT_MANAGER_PORT)"
                )
            )

    # ------------------------------------------------------------ asks

    def _on_ask(self, rank: int, ask: Ask, room: str | None) -> None:
        answered = self._local_answered if rank == self.local_rank else self._ranks[rank].answered
        if answered is not None and answered[0] == ask.seq:
            self._tell(rank, wire.Answer(ask.seq, answered[1]))
            return
        if room:
            self._room = room
        self._asks[rank] = ask
        if ask.failed and ask.quorum_id:
            self._on_break(rank, ask.quorum_id, ask.reason or f"group rank {rank} lost its process group")
        merged = merge_asks(self._asks, self._world_size)
        match merged:
            case None:
                if self._late_timer is None:
                    self._late_timer = self._later(LATE_S, self._tell_late)
            case Mismatch():
                self._refuse(ConfigError(merged.reason))
            case Ask():
                self.late = ""
                if self._open is not None and replace(merged, seq=self._open.seq) == self._open:
                    return
                self._seq += 1
                self._open = replace(merged, seq=self._seq)
                try:
                    self.lease.ask(self._open, self._room)
                except FaultToleranceError as error:
                    self._refuse(error)

    def _tell_late(self) -> None:
        self._late_timer = None
        absent = [rank for rank in range(self._world_size) if rank not in self._asks]
        if not self._asks or not absent:
            return
        gone = [r for r in absent if r in self._ranks and self._ranks[r].stream is None]
        self.late = f"waiting for group rank {', '.join(map(str, absent))} of {self.settings.replica_id} to ask"
        if gone:
            self.late += f" (not connected: {', '.join(map(str, gone))})"
        for rank in self._asks:
            self._tell(rank, wire.Reason(self.late))

    def _on_answer(self, answer: wire.Answer) -> None:
        if self._open is None or self._open.seq != answer.seq:
            return
        asks, self._asks, self._open = self._asks, {}, None
        self._quorum_id = answer.quorum.quorum_id
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer = None
        for rank, ask in asks.items():
            if rank == self.local_rank:
                self._local_answered = (ask.seq, answer.quorum)
            else:
                self._ranks[rank].answered = (ask.seq, answer.quorum)
        shared = wire.encode_quorum(answer.quorum)
        for rank, ask in asks.items():
            if rank == self.local_rank:
                deliver(self._handler, wire.Answer(ask.seq, answer.quorum))
            else:
                self._send(rank, wire.answer(ask.seq, shared))

    # ------------------------------------------------------------ votes and breaks

    def _on_vote(self, rank: int, vote: Verdict) -> None:
        verdict = self._votes.cast(rank, vote)
        decided = self.waiting.result(vote.quorum_id, vote.attempt)
        if decided is None and verdict is None:
            return
        if decided is not None and decided.outcome is not Outcome.BROKEN:
            self._tell_verdict((rank,), decided)
            return
        if decided is None and verdict is not None:
            decided = verdict
            self.waiting.decided(verdict)
            self._tell_verdict(tuple(self._ranks), verdict)
        elif decided is not None:
            self._tell_verdict((rank,), decided)
        if decided is not None and decided.outcome is Outcome.BROKEN:
            self._on_break(rank, vote.quorum_id, decided.reason)

    def _tell_verdict(self, ranks: tuple[int, ...], verdict: Verdict) -> None:
        data = wire.encode_push(verdict)
        for rank in ranks:
            if rank != self.local_rank:
                self._send(rank, data)

    def _on_break(self, rank: int | None, quorum_id: int, reason: str) -> None:
        """`rank` cannot go on in `quorum_id`, so the group cannot. Told once per quorum."""
        self.waiting.broke(quorum_id, reason)
        if quorum_id in self._told_broken:
            return
        self._told_broken[quorum_id] = None
        while len(self._told_broken) > MAX_BROKEN:
            self._told_broken.popitem(last=False)
        _log.info("%s: the group leaves quorum %#x: %s", self.settings.replica_id, quorum_id, reason)
        for other in range(self._world_size):
            if other != rank and other not in self._asks:
                self._tell(other, wire.Lost(quorum_id, (self.settings.replica_id,)))

    def _refuse(self, error: Exception) -> None:
        if self.fatal is not None:
            return
        self.fatal = error
        for rank in range(self._world_size):
            self._tell(rank, wire.Refusal(error))

    # ------------------------------------------------------------ to the ranks

    def _tell(self, rank: int, push: wire.Push) -> None:
        if rank != self.local_rank:
            self._send(rank, wire.encode_push(push))
        elif isinstance(push, wire.Refusal):
            self._handler.on_refused(push.error)
        else:
            deliver(self._handler, push)

    def _send(self, rank: int, data: bytes) -> None:
        stream = self._ranks[rank].stream
        if stream is not None:
            stream.send(data)

    def _on_push(self, push: wire.Push) -> None:
        """The lighthouse's word: to every rank."""
        if isinstance(push, wire.Answer):
            self._on_answer(push)
            return
        data = wire.encode_push(push)
        for rank in self._ranks:
            self._send(rank, data)
        if self.local_rank is not None:
            deliver(self._handler, push)

    def local_progress(self, step: int, phase: str, stable: Version, paused_s: float) -> None:
        """Where rank 0 is; called from its training thread."""
        self._local_pause = (step, phase, stable, time.monotonic() + paused_s if paused_s > 0 else 0.0)
        others_until = max((rank.paused_until for rank in self._ranks.values()), default=0.0)
        self.lease.progress(step, phase, stable, max(paused_s, others_until - time.monotonic(), 0.0))

    def _on_rank_progress(self, rank: int, progress: Progress) -> None:
        until = time.monotonic() + progress.paused_s if progress.paused_s > 0 else 0.0
        before, self._ranks[rank].paused_until = self._ranks[rank].paused_until, until
        if self.local_rank is None:
            self.lease.progress(progress.step, progress.phase, progress.stable, progress.paused_s)
        elif (before > 0) != (until > 0):
            step, phase, stable, mine = self._local_pause
            left_s = max(0.0, mine - time.monotonic())
            self.local_progress(step, progress.phase if until else phase, stable, left_s)

    # ------------------------------------------------------------ streams

    async def _join(self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        refusal = token_refusal(context.invocation_metadata(), self.settings.token, "the replica group")
        if refusal:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        stream = Stream(context, time.monotonic())
        try:
            error = await self._serve(stream)
            if error is not None:
                stream.send(wire.encode_push(wire.Refusal(error)))
                await stream.finish()
        except StreamDropped as dropped:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(dropped))
        finally:
            stream.stop()

    async def _serve(self, stream: Stream) -> Exception | None:
        try:
            first = await asyncio.wait_for(stream.read(), self.settings.budget.connect_s)
            join = wire.decode_group_request(first) if first is not None else None
        except ProtocolError as error:
            return error
        except asyncio.TimeoutError:
            return ProtocolError("nothing was said on this stream")
        if join is None:
            return None
        error = self._unwanted(join) if isinstance(join, wire.Join) else ProtocolError("expected a Join first")
        if error is not None or not isinstance(join, wire.Join):
            return error
        rank = self._ranks[join.rank]
        if rank.stream is not None:
            rank.stream.drop("a newer stream of the same process took over")
        if rank.grace is not None:
            rank.grace.cancel()
            rank.grace = None
        rank.stream, rank.incarnation, rank.left = stream, join.incarnation, False
        stream.send(wire.encode_joined(self.settings.budget.liveness_s))
        if self.fatal is not None:
            return self.fatal
        for quorum_id in self._told_broken:  # what it may have missed while it was away; receivers ignore old ones
            self._tell(join.rank, wire.Lost(quorum_id, (self.settings.replica_id,)))
        try:
            return await self._listen(join.rank, rank, stream)
        except ProtocolError as error:
            return error
        finally:
            self._rank_went(join.rank, rank, stream)

    def _unwanted(self, join: wire.Join) -> Exception | None:
        mine = self.settings.replica_id
        if join.replica_id != mine:
            return RefusedError(
                f"this is the group server of {mine}, not of {join.replica_id}: the ranks use two stores"
            )
        if join.world_size != self._world_size:
            return ConfigError(
                f"group rank {join.rank} of {mine} has world_size={join.world_size}, group rank 0 has {self._world_size}"
            )
        rank = self._ranks.get(join.rank)
        if rank is None:
            return ConfigError(f"group rank {join.rank} of {mine} is not one of ranks {sorted(self._ranks)}")
        if rank.stream is not None and rank.incarnation not in (0, join.incarnation):
            return ConfigError(f"two processes of {mine} call themselves group rank {join.rank} (RANK)")
        return None

    async def _listen(self, number: int, rank: _Rank, stream: Stream) -> Exception | None:
        while True:
            data = await stream.read()
            if data is None:
                return None
            message = wire.decode_group_request(data, self.settings.replica_id)
            match message:
                case wire.Renewal():
                    age_s = min(time.monotonic() - self.lease.last_ack, 1e8)
                    stream.send(wire.encode_push(wire.Acked(message.clock_s, age_s)))
                    self._on_rank_progress(number, message.progress)
                case wire.RankAsk():
                    self._on_ask(number, message.ask, message.room or None)
                case Verdict():
                    self._on_vote(number, message)
                case wire.Broken():
                    self._on_break(number, message.quorum_id, message.reason)
                case Left():
                    rank.left = True
                    stream.send(wire.encode_push(wire.Acked(0.0)))
                    await stream.finish()
                    return None
                case _:
                    return ProtocolError("a stream has one Join only")

    def _rank_went(self, number: int, rank: _Rank, stream: Stream) -> None:
        if rank.stream is not stream:
            return
        rank.stream = None
        if rank.left or self._stopping or self.fatal is not None:
            return
        silent = time.monotonic() - stream.heard_at > 0.75 * self.settings.budget.liveness_s
        grace_s = 0.0 if silent else self.settings.budget.grace_s
        rank.grace = self._later(grace_s, lambda: self._rank_died(number, rank))

    def _rank_died(self, number: int, rank: _Rank) -> None:
        if rank.stream is None and not rank.left and not self._stopping:
            self._asks.pop(number, None)
            reason = f"group rank {number} of {self.settings.replica_id} is gone (its connection to group rank 0 ended)"
            self._on_break(number, self._quorum_id, reason)


class _Relay:
    """The lease's handler in a group: hands everything to the group's loop."""

    def __init__(self, group: GroupServer, handler: LeaseHandler) -> None:
        self._group, self._handler = group, handler

    def hello(self) -> Hello:
        return self._handler.hello()

    def on_welcome(self, peers: Peers) -> None:
        self._group._server.post(lambda: self._handler.on_welcome(peers))

    def on_quorum(self, seq: int, quorum: Quorum) -> None:
        self._group.post_push(wire.Answer(seq, quorum))

    def on_reason(self, reason: str) -> None:
        self._group.post_push(wire.Reason(reason))

    def on_change_pending(self, quorum_id: int, reason: str) -> None:
        self._group.post_push(wire.Change(quorum_id, reason))

    def on_member_lost(self, quorum_id: int, lost: tuple[str, ...]) -> None:
        self._group.post_push(wire.Lost(quorum_id, lost))

    def on_paused(self, quorum_id: int, replica_id: str, for_s: float) -> None:
        self._group.post_push(wire.Busy(quorum_id, replica_id, for_s))

    def on_superseded(self, quorum_id: int) -> None:
        self._group.post_push(wire.Over(quorum_id))

    def on_refused(self, error: Exception) -> None:
        self._group.post_refused(error)

    def on_drain(self, reason: str) -> None:
        self._group.post_push(wire.Order(kill=False, reason=reason))

    def on_kill(self, reason: str) -> None:
        self._group.post_push(wire.Order(kill=True, reason=reason))


def _tls(settings: LeaseSettings) -> Tls | None:
    """A group serves TLS where it has a certificate to show; FT_TLS_CA alone is for the way to the lighthouse."""
    tls = settings.tls or Tls.from_env(os.environ)
    return tls if tls is not None and tls.cert and tls.key else None


class LeaderControl:
    """Group rank 0 of several: owns the lease and the group server. `address` ("host:port") is for the c10d store.

    Args:
        settings: of the group's lease.
        handler: of this rank.
        world_size: number of ranks in the group, 2 or more.
        hostname: what the other ranks can reach this one by; '': this machine's name.
        port: to listen on; 0: any free one.

    Raises:
        ConfigError: the port is taken, or an address form is wrong.
    """

    address: str
    """Valid as soon as the constructor returns (the port is bound there)."""

    def __init__(
        self, settings: LeaseSettings, handler: LeaseHandler, *, world_size: int, hostname: str = "", port: int = 0
    ) -> None:
        self._group = GroupServer(settings, handler, world_size=world_size, host="::", port=port)
        self.address = join_host(hostname or reachable_host("::"), self._group.port)

    def __repr__(self) -> str:
        return f"LeaderControl({self._group!r}, {self._group.lease!r})"

    @property
    def last_ack(self) -> float:
        """See Control."""
        return self._group.lease.last_ack

    @property
    def connected(self) -> bool:
        """See Control."""
        return self._group.lease.connected

    @property
    def last_reason(self) -> str:
        """See Control."""
        return self._group.late or self._group.lease.last_reason

    def start(self) -> None:
        """See Control."""
        self._group.start()

    def wait_connected(self, timeout_s: float) -> None:
        """See Control."""
        self._group.lease.wait_connected(timeout_s)

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """See Control."""
        if self._group.fatal is not None:
            raise self._group.fatal
        self._group.post_ask(0, ask, room)

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """See Control."""
        self._group.post_vote(0, verdict)
        return self._group.waiting.wait(verdict, timeout_s, self._group.settings.replica_id)

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """See Control."""
        self._group.local_progress(step, phase, stable, paused_s)

    def leave(self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float) -> bool:
        """The group leaves when its rank 0 does."""
        return self._group.lease.leave(reason, finished, version, agreed, timeout_s)

    def break_group(self, quorum_id: int, reason: str) -> None:
        """See Control."""
        self._group.post_break(0, quorum_id, reason)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """See Control."""
        self._group.shutdown(timeout_s)


class RankControl(StreamClient):
    """Group rank > 0. `settings.address` is the LeaderControl's `address`.

    If the leader cannot be reached within the budget's connect_s after `start`, or its stream is lost for as long,
    `on_refused` is called.
    """

    _method = f"/{GROUP}/Join"
    _other = "group rank 0"
    _advice = "check that group rank 0 runs, and that its host and port can be reached (FT_HOSTNAME, FT_MANAGER_PORT)"

    def __init__(self, settings: LeaseSettings, handler: LeaseHandler, *, rank: int, world_size: int) -> None:
        super().__init__(replace(settings, tls=_tls(settings)), handler)
        self._join = wire.Join(settings.replica_id, rank, world_size, secrets.randbits(63) | 1)
        self._waiting = _Waiting()
        self._open_ask: wire.RankAsk | None = None
        self._open_vote: Verdict | None = None
        self._left = False
        self._leaving: Left | None = None
        self._doing: tuple[int, str, Version, float] = (0, "", VOID, 0.0)
        self._quorum_id = 0
        self._deadline: threading.Timer | None = None

    def start(self) -> None:
        """See Control."""
        super().start()
        self._expect_leader(self.settings.budget.connect_s)

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """See Control."""
        message = wire.RankAsk(ask, room or "")
        data = wire.encode_rank(message)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._open_ask = message
            self._send(data)

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """See Control."""
        data = wire.encode_rank(verdict)
        with self._changed:
            self._open_vote = verdict
            self._send(data)
        return self._waiting.wait(verdict, timeout_s, self.settings.replica_id)

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """See Control."""
        was = self._doing[3]
        until = time.monotonic() + paused_s if paused_s > 0 else 0.0
        self._doing = (step, phase, stable, until)
        if until or was:
            with self._changed:
                self._renew_now()

    def leave(self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float) -> bool:
        """See Control."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._open_ask = None
            if self._fatal is None and self.connected:
                self._leaving = Left(self.settings.replica_id, 0, reason, finished, version, agreed)
                self._send(wire.encode_rank(self._leaving))
                while not self._left and self.connected and not self._stopping:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
            self._wanted = False
            self._close_stream()
            return self._left

    def break_group(self, quorum_id: int, reason: str) -> None:
        """See Control."""
        if self._waiting.broke(quorum_id, reason):
            data = wire.encode_rank(wire.Broken(quorum_id, reason))
            with self._changed:
                self._send(data)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """See Control."""
        with self._changed:
            if self._deadline is not None:
                self._deadline.cancel()
        super().shutdown(timeout_s)

    # ------------------------------------------------------------ the stream

    def _opening(self) -> bytes:
        return wire.encode_join(self._join, release())

    def _decode(self, data: bytes) -> wire.Push | None:
        return wire.decode_group_push(data)

    def _renewal(self, now: float) -> bytes:
        step, phase, stable, until = self._doing
        paused_s = max(0.0, until - now) if until else 0.0
        return wire.encode_rank(wire.Renewal(now, Progress("", 0, step, phase, stable, paused_s)))

    def _resend(self) -> list[bytes]:
        open_ = [self._open_ask, self._open_vote, self._leaving]
        return [wire.encode_rank(message) for message in open_ if message is not None]

    def _on_open(self, welcome: wire.Welcome) -> None:
        with self._changed:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    def _on_down(self) -> None:
        """The leader may only have blinked; past the grace, this rank cannot be told anything any more: broken."""
        self._expect_leader(self.settings.budget.grace_s, then_for_good=True)

    def _expect_leader(self, within_s: float, *, then_for_good: bool = False) -> None:
        def late() -> None:
            with self._changed:
                if self.connected or self._stopping or not self._wanted or self._fatal is not None:
                    return
                quorum_id = self._quorum_id
            if then_for_good:
                reason = f"group rank 0 of {self.settings.replica_id} is gone (the connection to it ended)"
                if self._waiting.broke(quorum_id, reason):
                    self._handler.on_member_lost(quorum_id, (self.settings.replica_id,))
                self._expect_leader(self.settings.budget.connect_s)
            else:
                self._refuse(RefusedError(self._unreachable(f"within {within_s:g} s")))

        with self._changed:
            if self._stopping:
                return
            self._deadline = threading.Timer(within_s, late)
            self._deadline.daemon = True
            self._deadline.start()

    def _on_acked(self, acked: wire.Acked) -> None:
        super()._on_acked(acked)
        if acked.clock_s == 0.0:
            with self._changed:
                self._left = self._leaving is not None
                self._changed.notify_all()

    def _on_push(self, push: wire.Push) -> None:
        match push:
            case wire.Answer():
                with self._changed:
                    if self._open_ask is None or self._open_ask.ask.seq != push.seq:
                        return
                    self._open_ask = self._open_vote = None
                    self._quorum_id = push.quorum.quorum_id
                    self.last_reason = ""
            case Verdict():
                with self._changed:
                    vote = self._open_vote
                    if vote is not None and (vote.quorum_id, vote.attempt) == (push.quorum_id, push.attempt):
                        self._open_vote = None
                self._waiting.decided(push)
                return
            case wire.Lost() if self.settings.replica_id in push.lost:
                self._waiting.broke(push.quorum_id, "another rank of this group is broken")
            case wire.Reason():
                self.last_reason = push.text
            case _:
                pass
        deliver(self._handler, push)
