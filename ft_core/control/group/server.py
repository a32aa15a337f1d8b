"""The leader of a replica group: streams, a timer and the lease around `protocol.group.Group`, which decides (R12).

How it works. Group rank 0 holds the lease with the lighthouse and serves the other ranks, each of which keeps one
stream open to it. What arrives (from the lease, from a rank's stream, from the threads of this process) becomes an
event of the machine; what the machine says is performed: pushes to the ranks, asks and reports to the lighthouse. There
is no tick: one timer stands at the machine's `next_at`. `control.link` wraps it for the Manager.

The rank in this process has no stream: its pushes go to `waiting` and to its handler, as the others' do at their end.

Threads: everything happens on the loop thread, including the calls to the handler, so that these stay one at a time;
other threads only post to it. `Waiting` is where the threads of this process wait for verdicts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ft_core.access import Tokens, check_listener, insecure
from ft_core.control.group.pending_votes import Waiting
from ft_core.control.group.tls import group_tls
from ft_core.control.lighthouse.lease_client import LeaseClient
from ft_core.errors import ConfigError, FaultToleranceError, ProtocolError
from ft_core.protocol.group import events as ev
from ft_core.protocol.group.group import Group
from ft_core.protocol.group.ranks import Join
from ft_core.protocol.group.settings import GroupSettings
from ft_core.protocol.lighthouse.events import Left
from ft_core.protocol.pushes import Acked, Answer, Order, Refusal, Welcome
from ft_core.protocol.types import VOID, Verdict, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import GROUP, grpc, join_host, server_options
from ft_core.rpc.loop_server import LoopServer
from ft_core.rpc.stream_host import Caller, StreamHost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.pushes import Push
    from ft_core.rpc.lasting_stream import LeaseSettings, PushHandler
    from ft_core.rpc.loop_server import Stream

PART_S = 2.0
"""How long the leader of a group that has finished waits for the other ranks to say goodbye, too."""
FLUSH_S = 0.5
"""How long a leader that shuts down waits for its last messages to leave."""
MAX_AGE_S = 1e8
"""What a lease's age is told as at most: one that was never acknowledged is infinitely old."""


@dataclass(eq=False)
class RankCaller(Caller):
    """The stream of one rank."""

    rank: int = 0


class GroupServer(StreamHost[RankCaller]):
    """Combines the ranks of one group; used by `LeaderControl` and `coordination.ManagerServer`.

    Args:
        settings: the group's lease settings.
        handler: of the rank that lives in this process, `local_rank`.
        world_size: number of ranks.
        host, port: what to listen on; port 0 takes a free one.
        local_rank: which rank calls in process; None: all ranks come over the network.
        drains: an order to drain ends the group's asking: no rank enters another quorum, so all of them leave alike.
    """

    _name = "the replica group"
    _first = "Join"
    _log = logging.getLogger(__name__)

    def __init__(
        self, settings: LeaseSettings, handler: PushHandler, *, world_size: int, host: str, port: int,
        local_rank: int | None = 0, drains: bool = False,
    ) -> None:  # fmt: skip
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        budget = settings.budget
        super().__init__(Tokens(settings.token), budget.connect_s, time.monotonic)
        self.settings = settings
        self.waiting = Waiting(settings.replica_id, budget.grace_s)
        self._handler = handler
        self._local_rank = local_rank
        self._group = Group(
            GroupSettings(
                settings.replica_id, world_size, budget.liveness_s, budget.grace_s, budget.connect_s, drains=drains
            )
        )
        if local_rank is not None:
            self._group.handle(ev.RankJoined(local_rank, incarnation=1), time.monotonic())
        self._ranks: dict[int, RankCaller] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._doing: tuple[int, str, Version] = (0, "", VOID)
        """Step, phase and stable version of the rank in this process; without one, of the rank that reported last."""
        self._paused_until = 0.0
        """Until when the group is busy (monotonic s), as the machine said last."""
        self._pauses = False
        """The rank in this process has announced a pause."""
        self._stopping = False
        self._all_know = threading.Event()
        """No rank is left that would have to hear of a refusal."""
        self._all_left = threading.Event()
        """Every rank has said goodbye."""
        self.lease = LeaseClient(settings, self)
        tls = group_tls(settings)
        check_listener(
            f"the server of this replica's ranks (bind={join_host(host, port)})", host, settings.token, tls,
            "whoever reaches this address may take the place of a rank", insecure(os.environ),
        )  # fmt: skip
        self._server = LoopServer("ft-group", server_options(budget.liveness_s), tls)
        join: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self.serve)
        self._server.start(host, port, "FT_MANAGER_PORT", {GROUP: {"Join": join}})
        self.port = self._server.port

    def __repr__(self) -> str:
        return f"GroupServer({self._group!r})"

    @property
    def late(self) -> str:
        """Which ranks are waited for, once that takes long; '' otherwise."""
        return self._group.late

    @property
    def fatal(self) -> Exception | None:
        """Why the group was refused for good."""
        return self._group.fatal

    # ------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Open the lease, and begin to expect the other ranks."""
        self.lease.start()
        self.post(ev.Started(self.port))

    def post(self, event: ev.Event) -> None:
        """Something happened, in a thread of this process or at the lighthouse."""
        self._server.post(lambda: self._feed(event))

    def progress(self, step: int, phase: str, stable: Version, paused_s: float) -> None:
        """Where the rank of this process is; called from its training thread."""
        self._doing = (step, phase, stable)
        self._renew(paused_s=paused_s)
        if self._local_rank is not None and (paused_s > 0 or self._pauses):
            self._pauses = paused_s > 0
            self.post(ev.RankProgress(self._local_rank, phase, paused_s))

    def wait_for_goodbyes(self, timeout_s: float) -> None:
        """The group has finished: let the other ranks say so before their streams end. At most PART_S."""
        if self._server.post(self._look_for_goodbyes):
            self._all_left.wait(min(PART_S, timeout_s))

    def shutdown(self, timeout_s: float) -> None:
        """End lease and server; if the group was refused, not before every rank has heard it, or after `connect_s`.

        So long may its ranks take to come, each on its own: nobody else could tell them that there is nothing to do.
        """
        self.lease.shutdown(timeout_s)  # what it was told last has been posted then
        if self._server.post(self._say_who_is_waited_for):
            self._all_know.wait(self.settings.budget.connect_s)
        done = threading.Event()
        if self._server.post(lambda: self._end(done)):
            done.wait(min(FLUSH_S, timeout_s))
        self._server.shutdown(timeout_s)

    # ------------------------------------------------------------ PushHandler (lease thread)

    def hello(self) -> Hello:
        """What to present when the lease is (re-)opened."""
        hello, asked_with = self._handler.hello(), self._group.signature
        if asked_with is None or not hello.signature:
            return hello
        return replace(hello, signature=asked_with[0], signature_lines=asked_with[1])

    def on_push(self, push: Push) -> None:
        """Something arrived from the lighthouse."""
        match push:
            case Welcome():
                self.post(ev.Welcomed())
                self._server.post(lambda: self._handler.on_push(push))
            case Answer():
                self.post(ev.Answered(push.seq, push.quorum))
            case Refusal():
                self.post(ev.RefusedByLighthouse(push.error))
            case Order(kill=False):
                self.post(ev.DrainOrdered(push.reason))
            case _:
                self.post(ev.Pushed(push))

    # ------------------------------------------------------------ the machine (loop)

    def _feed(self, event: ev.Event) -> None:
        for effect in self._group.handle(event, time.monotonic()):
            self._perform(effect)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._group.next_at is not None and not self._stopping:
            self._timer = asyncio.get_running_loop().call_at(self._group.next_at, self._feed, ev.Tick())

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Decide():
                self._tell(effect.to, effect.verdict)
            case ev.Tell():
                self._tell((effect.rank,), effect.push)
            case ev.TellAll():
                self._tell(range(self._group.settings.world_size), effect.push)
            case ev.Refuse():
                self._tell(range(self._group.settings.world_size), Refusal(effect.error))
            case ev.Announce():
                self._announce(effect)
            case ev.AskLighthouse():
                try:
                    self.lease.ask(effect.ask, effect.room)
                except FaultToleranceError as error:
                    self.post(ev.RefusedByLighthouse(error))
            case ev.ReportIncomplete():
                self.lease.report_incomplete(effect.quorum_id, effect.reason)
            case ev.RenewLease():
                self._paused_until = time.monotonic() + effect.paused_s
                self._renew(effect.phase)
            case ev.Note():
                self._log.info(effect.text)

    def _renew(self, phase: str = "", paused_s: float = 0.0) -> None:
        step, own, stable = self._doing
        left_s = self._paused_until - time.monotonic()
        self.lease.progress(step, phase or own, stable, max(0.0, paused_s, left_s))

    def _announce(self, effect: ev.Announce) -> None:
        shared = codec.encode_quorum(effect.quorum)
        for rank, seq in effect.to:
            self._send(rank, Answer(seq, effect.quorum), codec.answer(seq, shared))

    def _tell(self, ranks: Iterable[int], push: Push) -> None:
        data = codec.encode_push(push)
        for rank in ranks:
            self._send(rank, push, data)

    def _send(self, rank: int, push: Push, data: bytes) -> None:
        if rank == self._local_rank:
            self.waiting.take(push)
            if not isinstance(push, Verdict | Welcome):  # the lighthouse's welcome was its own
                self._handler.on_push(push)
        elif (caller := self._ranks.get(rank)) is not None:
            caller.stream.send(data)

    # ------------------------------------------------------------ streams of the ranks (loop)

    def _let_in(self, first: bytes, stream: Stream) -> RankCaller | Exception:
        join = codec.decode_group_request(first)
        if not isinstance(join, Join):
            raise ProtocolError("the first message of a rank must be a Join")
        refusal = self._group.refusal(join)
        if refusal is not None:
            return refusal
        caller = RankCaller(f"group rank {join.rank}", stream, rank=join.rank)
        self._enter(caller, self._ranks, join.rank)
        self._feed(ev.RankJoined(join.rank, join.incarnation))
        self._look_for_untold()
        return caller

    def _received(self, caller: RankCaller, data: bytes) -> None:
        message = codec.decode_group_request(data, self.settings.replica_id)
        rank = caller.rank
        match message:
            case codec.Renewal():
                age_s = min(time.monotonic() - self.lease.last_ack, MAX_AGE_S)
                caller.stream.send(codec.encode_push(Acked(message.clock_s, age_s)))
                done = message.progress
                if self._local_rank is None:
                    self._doing = (done.step, done.phase, done.stable)
                    self._renew()
                self._feed(ev.RankProgress(rank, done.phase, done.paused_s))
            case codec.RankAsk():
                self._feed(ev.RankAsked(rank, message.ask, message.room or None))
            case Verdict():
                self._feed(ev.RankVoted(rank, message))
            case codec.Broken():
                self._feed(ev.RankBroke(rank, message.quorum_id, message.reason))
            case Order():
                self._feed(ev.DrainOrdered(message.reason))
            case Left():
                caller.left = True
                self._feed(ev.RankLeft(rank))
                self._look_for_goodbyes()
            case _:
                raise ProtocolError("a stream has one Join only")

    def _ended(self, caller: RankCaller) -> None:
        if not (caller.left or self._stopping):
            self._feed(ev.RankGone(caller.rank, caller.stream.silence_s))
            self._look_for_goodbyes()

    # ------------------------------------------------------------ the end (loop)

    def _say_who_is_waited_for(self) -> None:
        """The rest of the ranks may be starting up: they would find nobody here, and never learn what was refused."""
        if untold := self._group.untold:
            names, mine = ", ".join(map(str, untold)), self.settings.replica_id
            limit_s = self.settings.budget.connect_s
            self._log.info("%s: waits up to %g s for group rank %s, to tell it the same", mine, limit_s, names)
        else:
            self._all_know.set()

    def _look_for_untold(self) -> None:
        if self.fatal is not None and not self._group.untold:
            self._all_know.set()

    def _look_for_goodbyes(self) -> None:
        if all(caller.left for caller in self._ranks.values()):
            self._all_left.set()

    def _end(self, done: threading.Event) -> None:
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        asyncio.ensure_future(self.flush()).add_done_callback(lambda _: done.set())
