"""Agreement among the ranks of a replica group: they ask, vote, break and leave as one (R12).

How it works. Group rank 0 holds the lease with the lighthouse and serves the other ranks, each of which keeps one
stream open to it. What all ranks have to agree on is decided by the pure `group.merge_asks` and `group.Votes`; the
lighthouse's pushes are relayed to every rank as they come. `control.link` wraps it for the Manager.

A rank that is broken, or whose stream ends and does not come back within the grace, breaks the group in that quorum:
votes on it are BROKEN, and every other rank hears `on_member_lost` with its own replica_id.

Threads: everything in `GroupServer` happens on its loop thread, including the calls to rank 0's handler, so that these
stay one at a time; other threads only post to it. `Waiting` is where the threads of this process wait for verdicts.

Invariants: votes are keyed (quorum_id, attempt), idempotent, and may be presented again; a break is told once per
quorum; what is remembered of quorums is bounded by MAX_BROKEN and group.MAX_OPEN_VOTES.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.control.group.pending_votes import MAX_BROKEN, Waiting
from ft_core.control.group.ranks import Rank, group_tls, named, never_came, not_asked, read_join, unwanted
from ft_core.control.group.relay import Relay
from ft_core.control.lighthouse.lease_client import LeaseClient, LeaseHandler, LeaseSettings
from ft_core.errors import ConfigError, FaultToleranceError, ProtocolError
from ft_core.protocol.group.group import Mismatch, Votes, merge_asks
from ft_core.protocol.lighthouse.events import Left, Progress
from ft_core.protocol.pauses import GroupPauses
from ft_core.protocol.types import VOID, Ask, Outcome, Quorum, Verdict, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import GROUP, grpc, server_options, token_refusal
from ft_core.rpc.lease_handler import deliver
from ft_core.rpc.loop_server import LoopServer, Stream, StreamDropped, Timers

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_S = 1.0
"""After this long, ranks that have asked are told which ranks have not."""
FLUSH_S = 0.5
"""How long a leader that shuts down waits for its last messages to leave."""
TELL_S = 5.0
"""How long a leader that was refused waits, before it ends, for ranks that have not connected yet, to tell them why."""

_log = logging.getLogger(__name__)


class GroupServer:
    """Combines the ranks of one group; used by `LeaderControl` and `coordination.ManagerServer`.

    Args:
        settings: the group's lease settings.
        handler: of the rank that lives in this process, `local_rank`.
        world_size: number of ranks.
        host, port: what to listen on; port 0 takes a free one.
        local_rank: which rank calls in process; None: all ranks come over the network.
        drains: an order to drain ends the group's asking: no rank enters another quorum, so all of them leave alike.
    """

    def __init__(
        self, settings: LeaseSettings, handler: LeaseHandler, *, world_size: int, host: str, port: int,
        local_rank: int | None = 0, drains: bool = False,
    ) -> None:  # fmt: skip
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        self.settings = settings
        self.local_rank = local_rank
        self.waiting = Waiting()
        self.late = ""
        """Which ranks are waited for, once that takes long; '' otherwise."""
        self.fatal: Exception | None = None
        self._handler = handler
        self._world_size = world_size
        self._ranks = {rank: Rank() for rank in range(world_size) if rank != local_rank}
        self._asks: dict[int, Ask] = {}
        self._room: str | None = None
        self._open: Ask | None = None
        """The group's ask that the lighthouse has not answered."""
        self._seq = 0
        self._local_answered: tuple[int, Quorum] | None = None
        self._votes = Votes(world_size)
        self._quorum_id = 0
        self._incomplete = False
        """The lighthouse knows that a rank is missing."""
        self._told_broken: OrderedDict[int, None] = OrderedDict()
        self._timers = Timers()
        self._late_timer: asyncio.TimerHandle | None = None
        self._local: tuple[int, str, Version, float] = (0, "", VOID, 0.0)
        """Rank 0's step, phase, stable version, and until when it is paused."""
        self._pauses = GroupPauses(world_size)
        self._stopping = False
        self._nobody_missing = threading.Event()  # no rank is left that would have to be told of a refusal
        self._refusing: set[Stream] = set()  # streams to which a refusal is being sent
        self._drains = drains
        self._drain: codec.Order | None = None
        self._admitted = asyncio.Event()  # the lighthouse has welcomed the group, or refused it
        self.lease = LeaseClient(settings, Relay(self.post, handler, self._admitted.set, self._on_push, self._refuse))
        self._server = LoopServer("ft-group", server_options(settings.budget.liveness_s), group_tls(settings))
        join: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.start(host, port, "FT_MANAGER_PORT", {GROUP: {"Join": join}})
        self.port = self._server.port

    def __repr__(self) -> str:
        here = sum(rank.stream is not None for rank in self._ranks.values())
        return f"GroupServer({self.settings.replica_id}, ranks={here}/{len(self._ranks)}, asked={len(self._asks)})"

    # ------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Open the lease, and begin to expect the other ranks."""
        self.lease.start()
        self._server.post(lambda: self._timers.later(self.settings.budget.connect_s, self._missing))

    def post_ask(self, rank: int, ask: Ask, room: str | None) -> None:
        """A rank asks."""
        self._server.post(lambda: self._on_ask(rank, ask, room))

    def post_vote(self, rank: int, vote: Verdict) -> None:
        """A rank votes."""
        self._server.post(lambda: self._on_vote(rank, vote))

    def post_break(self, rank: int | None, quorum_id: int, reason: str) -> None:
        """A rank is broken."""
        self._server.post(lambda: self._on_break(rank, quorum_id, reason))

    def post_drain(self, reason: str) -> None:
        """A rank is to drain, so the group is."""
        self._server.post(lambda: self._on_push(codec.Order(kill=False, reason=reason)))

    def post(self, work: Callable[[], object]) -> None:
        """Run on the loop."""
        self._server.post(work)

    def shutdown(self, timeout_s: float) -> None:
        """End lease and server; if the group was refused, not before every rank was told, or TELL_S."""
        self.lease.shutdown(timeout_s)
        if self.fatal is not None and self._server.post(self._look_for_missing):
            self._nobody_missing.wait(min(TELL_S, timeout_s, self.settings.budget.connect_s))
        self._server.post(self._end)
        done = threading.Event()
        if self._server.post(lambda: self._flush(done)):
            done.wait(min(FLUSH_S, timeout_s))
        self._server.shutdown(timeout_s)

    # ------------------------------------------------------------ timers (loop)

    def _end(self) -> None:
        self._stopping = True
        self._timers.cancel()

    def _flush(self, done: threading.Event) -> None:
        ends = [s.finish() for s in {rank.stream for rank in self._ranks.values()} | self._refusing if s is not None]
        asyncio.gather(*ends, return_exceptions=True).add_done_callback(lambda _: done.set())

    def _look_for_missing(self) -> None:
        """The rest of the ranks may be starting up: they would find nobody here, and never learn what was refused."""
        if self.fatal is not None and all(r.incarnation for r in self._ranks.values()) and not self._refusing:
            self._nobody_missing.set()

    def _missing(self) -> None:
        absent = [number for number, rank in self._ranks.items() if rank.incarnation == 0]
        if absent and not self._stopping:
            self._nobody_missing.set()  # they were waited for
            connect_s = self.settings.budget.connect_s
            self._refuse(never_came(self.settings.replica_id, absent, self.port, connect_s, self._world_size))

    # ------------------------------------------------------------ asks

    def _on_ask(self, rank: int, ask: Ask, room: str | None) -> None:
        answered = self._local_answered if rank == self.local_rank else self._ranks[rank].answered
        if answered is not None and answered[0] == ask.seq:
            self._tell(rank, codec.Answer(ask.seq, answered[1]))
            return
        if room:
            self._room = room
        self._asks[rank] = ask
        if ask.failed and ask.quorum_id:
            self._on_break(rank, ask.quorum_id, ask.reason or f"group rank {rank} lost its process group")
        if self._drain is not None and self._drains:
            self._tell(rank, self._drain)
            return
        merged = merge_asks(self._asks, self._world_size)
        match merged:
            case None:
                if self._late_timer is None:
                    self._late_timer = self._timers.later(LATE_S, self._tell_late)
            case Mismatch():
                self._refuse(ConfigError(merged.reason))
            case Ask():
                self.late = ""
                if self._open is None or replace(merged, seq=self._open.seq) != self._open:
                    self._seq += 1
                    self._open = replace(merged, seq=self._seq)
                elif not self._incomplete:
                    return
                self._incomplete = False
                try:
                    self.lease.ask(self._open, self._room)
                except FaultToleranceError as error:
                    self._refuse(error)

    def _tell_late(self) -> None:
        self._late_timer = None
        absent = [rank for rank in range(self._world_size) if rank not in self._asks]
        if not self._asks or not absent or self._stopping:
            return
        paused_s = self._pauses.left_s(absent, time.monotonic())
        self.late = not_asked(self.settings.replica_id, absent, self._ranks, paused_s)
        for rank in self._asks:
            self._tell(rank, codec.Reason(self.late, paused_s))

    def _on_answer(self, answer: codec.Answer) -> None:
        if self._open is None or self._open.seq != answer.seq:
            return
        asks, self._asks, self._open = self._asks, {}, None
        self._quorum_id = answer.quorum.quorum_id
        self.waiting.new_quorum()
        self._pauses.new_quorum()
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer = None
        shared = codec.encode_quorum(answer.quorum)
        for rank, ask in asks.items():
            if rank == self.local_rank:
                self._local_answered = (ask.seq, answer.quorum)
                deliver(self._handler, codec.Answer(ask.seq, answer.quorum))
            else:
                self._ranks[rank].answered = (ask.seq, answer.quorum)
                self._send(rank, codec.answer(ask.seq, shared))
        if len(asks) < self._world_size:
            self._report_incomplete(f"a rank of {self.settings.replica_id} went while the quorum formed")
        self._share_pause()  # what was open when the quorum formed is news to it

    # ------------------------------------------------------------ votes and breaks

    def _on_vote(self, rank: int, vote: Verdict) -> None:
        verdict = self._votes.cast(rank, vote)
        decided = self.waiting.result(vote.quorum_id, vote.attempt)
        ranks: tuple[int, ...] = (rank,)
        if decided is None:
            if verdict is None:
                return
            decided, ranks = verdict, tuple(self._ranks)
            self.waiting.decided(verdict)
        data = codec.encode_push(decided)
        for other in ranks:
            if other != self.local_rank:
                self._send(other, data)
        if decided.outcome is Outcome.BROKEN:
            self._on_break(rank, vote.quorum_id, decided.reason)

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
                self._tell(other, codec.Lost(quorum_id, (self.settings.replica_id,)))

    def _refuse(self, error: Exception) -> None:
        if self.fatal is not None:
            return
        self.fatal = error
        self._admitted.set()
        for rank in range(self._world_size):
            self._tell(rank, codec.Refusal(error))

    # ------------------------------------------------------------ to the ranks

    def _tell(self, rank: int, push: codec.Push) -> None:
        if rank != self.local_rank:
            self._send(rank, codec.encode_push(push))
        elif isinstance(push, codec.Refusal):
            self._handler.on_refused(push.error)
        else:
            deliver(self._handler, push)

    def _send(self, rank: int, data: bytes) -> None:
        stream = self._ranks[rank].stream
        if stream is not None:
            stream.send(data)

    def _on_push(self, push: codec.Push) -> None:
        """The lighthouse's word: to every rank."""
        if isinstance(push, codec.Answer):
            self._on_answer(push)
            return
        if isinstance(push, codec.Order) and not push.kill:
            self._drain = push
            if self._drains:
                self._open = None  # an answer that is on its way is for nobody any more
        if isinstance(push, codec.Busy):
            self.waiting.paused(push.replica_id, push.for_s)
        self._tell_all(push)

    def _tell_all(self, push: codec.Push) -> None:
        data = codec.encode_push(push)
        for rank in self._ranks:
            self._send(rank, data)
        if self.local_rank is not None:
            deliver(self._handler, push)

    # ------------------------------------------------------------ progress and pauses

    def local_progress(self, step: int, phase: str, stable: Version, paused_s: float) -> None:
        """Where rank 0 is; called from its training thread."""
        now, was = time.monotonic(), self._local[3]
        self._local = (step, phase, stable, now + paused_s if paused_s > 0 else 0.0)
        self.lease.progress(step, phase, stable, max(paused_s, self._pauses.left_s(self._ranks, now)))
        if was or paused_s > 0:
            self._server.post(self._share_pause)

    def _on_rank_progress(self, rank: int, progress: Progress) -> None:
        now = time.monotonic()
        changed = self._pauses.set(rank, now + progress.paused_s if progress.paused_s > 0 else 0.0)
        if self.local_rank is None:
            paused_s = self._pauses.left_s(self._ranks, now)
            self.lease.progress(progress.step, progress.phase, progress.stable, paused_s)
        elif changed:
            step, phase, stable, mine = self._local
            self.local_progress(step, progress.phase if progress.paused_s > 0 else phase, stable, max(0.0, mine - now))
        if changed:
            self._share_pause()

    def _share_pause(self) -> None:
        """While a rank is busy the others' votes wait for it, and the asks of those that have asked already."""
        if self.local_rank is not None:
            self._pauses.set(self.local_rank, self._local[3])
        left_s = self._pauses.news(time.monotonic())
        if left_s is None:
            return
        self.waiting.paused(self.settings.replica_id, left_s)
        self._tell_all(codec.Busy(self._quorum_id, self.settings.replica_id, left_s))
        if self.late:
            self._tell_late()

    # ------------------------------------------------------------ streams

    async def _join(self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if refusal := token_refusal(context.invocation_metadata(), self.settings.token, "the replica group"):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        stream = Stream(context, time.monotonic)
        try:
            error = await self._serve(stream)
            if error is not None:
                self._refusing.add(stream)
                stream.send(codec.encode_push(codec.Refusal(error)))
                await stream.finish()
        except StreamDropped as dropped:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(dropped))
        finally:
            stream.stop()
            self._refusing.discard(stream)
            self._look_for_missing()

    async def _serve(self, stream: Stream) -> Exception | None:
        join = await read_join(stream, self.settings.budget.connect_s)
        if not isinstance(join, codec.Join):
            return join
        if (refusal := unwanted(join, self.settings.replica_id, self._world_size, self._ranks)) is not None:
            return refusal
        rank = self._ranks[join.rank]
        if rank.stream is not None:
            rank.stream.drop("a newer stream of the same process took over")
        if rank.grace is not None:
            rank.grace.cancel()
            rank.grace = None
        rank.stream, rank.incarnation, rank.left = stream, join.incarnation, False
        try:
            await self._admitted.wait()  # a rank whose group is refused has to hear that, and not that it has joined
            if self.fatal is not None:
                return self.fatal
            stream.send(codec.encode_joined(self.settings.budget.liveness_s))
            self._tell_missed(join.rank)
            return await self._listen(join.rank, rank, stream)
        except ProtocolError as error:
            return error
        finally:
            self._rank_went(join.rank, rank, stream)

    def _tell_missed(self, rank: int) -> None:
        """What a rank may have missed while its stream was away; it ignores what is about older quorums."""
        for quorum_id in self._told_broken:
            self._tell(rank, codec.Lost(quorum_id, (self.settings.replica_id,)))
        for who, for_s in self.waiting.pauses().items():
            self._tell(rank, codec.Busy(self._quorum_id, who, for_s))
        if self._drain is not None:
            self._tell(rank, self._drain)

    async def _listen(self, number: int, rank: Rank, stream: Stream) -> Exception | None:
        while True:
            data = await stream.read()
            if data is None:
                return None
            message = codec.decode_group_request(data, self.settings.replica_id)
            match message:
                case codec.Renewal():
                    age_s = min(time.monotonic() - self.lease.last_ack, 1e8)
                    stream.send(codec.encode_push(codec.Acked(message.clock_s, age_s)))
                    self._on_rank_progress(number, message.progress)
                case codec.RankAsk():
                    self._on_ask(number, *named(message, self.settings.replica_id, self._world_size))
                case Verdict():
                    self._on_vote(number, message)
                case codec.Broken():
                    self._on_break(number, message.quorum_id, message.reason)
                case codec.Order():
                    self._on_push(message)
                case Left():
                    rank.left = True
                    stream.send(codec.encode_push(codec.Acked(0.0)))
                    await stream.finish()
                    return None
                case _:
                    return ProtocolError("a stream has one Join only")

    def _rank_went(self, number: int, rank: Rank, stream: Stream) -> None:
        if rank.stream is not stream:
            return
        rank.stream = None
        if rank.left or self._stopping or self.fatal is not None:
            return
        silent = stream.silence_s > 0.75 * self.settings.budget.liveness_s
        grace_s = 0.0 if silent else self.settings.budget.grace_s
        rank.grace = self._timers.later(grace_s, lambda: self._rank_died(number, rank))

    def _rank_died(self, number: int, rank: Rank) -> None:
        if rank.stream is None and not rank.left and not self._stopping:
            self._asks.pop(number, None)
            self._report_incomplete(
                f"group rank {number} of {self.settings.replica_id} is gone or frozen (its connection to group rank 0 "
                "ended)"
            )

    def _report_incomplete(self, reason: str) -> None:
        """Without a rank the group can neither go on nor ask: the other groups learn it now, not at their timeout."""
        self._incomplete = True
        self._on_break(None, self._quorum_id, reason)
        self.lease.report_incomplete(self._quorum_id, reason)
