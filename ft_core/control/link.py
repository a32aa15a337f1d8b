"""One rank's view of the control plane, the same interface wherever the rank stands in its group (R12).

`LocalControl` is the only rank of a group: its lease, and a vote is its own answer. `LeaderControl` is rank 0 of
several: it holds the lease and serves the others (`control.group.server`). `RankControl` is one of the others, with one
stream to rank 0.

Threads: `vote` blocks the calling thread; everything else returns at once (`leave` and `shutdown` are bounded).
Handlers are called on one control-plane thread, one call at a time: the lease's, or on rank 0 of several the group
server's loop.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ft_core.control.group.pending_votes import Waiting
from ft_core.control.group.server import GroupServer
from ft_core.control.group.tls import group_tls
from ft_core.control.lighthouse.lease_client import LeaseClient
from ft_core.errors import RefusedError
from ft_core.network import is_loopback
from ft_core.protocol.group import events as ev
from ft_core.protocol.group.follower import Broken, Follower, FollowerSettings, Unreachable
from ft_core.protocol.group.ranks import Join
from ft_core.protocol.pushes import Answer, Order, Reason
from ft_core.protocol.types import Ask, Verdict, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import GROUP, join_host, reachable_host, release
from ft_core.rpc.reporting_stream import ReportingStream

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.events import Left
    from ft_core.protocol.pushes import Push, Welcome
    from ft_core.rpc.lasting_stream import LeaseSettings, PushHandler


class Control(Protocol):
    """One rank's view of the control plane, the same for all ranks of a group. Answers come through its PushHandler.

    Only group rank 0 is asked for a `hello`, and sent a Welcome.
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
        """Wait for the first connection. Raises LighthouseError, or the error of a Refusal."""

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """This rank's part of the group's ask; the answer comes as `Answer(ask.seq, ...)`."""

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """The group's verdict; BROKEN if it is not known within `timeout_s` or a rank died."""

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """Note where training is; cheap."""

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        """Say goodbye; True if it was acknowledged."""

    def break_group(self, quorum_id: int, reason: str) -> None:
        """This rank is broken in `quorum_id`: tell the group's other ranks. Never blocks."""

    def drain(self, reason: str) -> None:
        """This rank is to drain: every rank of the group is sent the order. Never blocks."""

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Close everything. Idempotent, bounded."""


class LocalControl(LeaseClient):
    """group_world_size == 1: the lease itself."""

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:  # noqa: ARG002
        """The group's verdict is this rank's."""
        return verdict

    def break_group(self, quorum_id: int, reason: str) -> None:
        """There is nobody else to tell."""

    def drain(self, reason: str) -> None:
        """See Control."""
        self._handler.on_push(Order(kill=False, reason=reason))


class LeaderControl:
    """Group rank 0 of several: owns the lease and the group server. `address` ("host:port") is for the c10d store.

    Args:
        settings: of the group's lease.
        handler: of this rank.
        world_size: number of ranks in the group, 2 or more.
        hostname: what the other ranks can reach this one by; '': this machine's name.
        port: to listen on; 0: any free one.
        drains: the ranks end when they are told to drain, so the group asks for no further quorum then.

    Raises:
        ConfigError: the port is taken, or an address form is wrong.
    """

    address: str
    """Valid as soon as the constructor returns (the port is bound there)."""

    def __init__(
        self, settings: LeaseSettings, handler: PushHandler, *, world_size: int, hostname: str = "", port: int = 0,
        drains: bool = False,
    ) -> None:  # fmt: skip
        host = hostname or reachable_host("::")
        tls = group_tls(settings)
        if tls is not None:
            tls.check_names(host)
        here = "127.0.0.1" if host == "localhost" else host
        bind = here if is_loopback(here) else "::"
        self._group = GroupServer(settings, handler, world_size=world_size, host=bind, port=port, drains=drains)
        self.address = join_host(host, self._group.port)

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
        self._group.post(ev.RankAsked(0, ask, room))

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """See Control."""
        self._vote(verdict)
        return self._group.waiting.wait(verdict, timeout_s, self._vote)

    def _vote(self, vote: Verdict) -> None:
        self._group.post(ev.RankVoted(0, vote))

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """See Control."""
        self._group.progress(step, phase, stable, paused_s)

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        """The group leaves when its rank 0 does."""
        left = self._group.lease.leave(reason, finished, version, agreed, timeout_s, over)
        if finished:
            self._group.wait_for_goodbyes(timeout_s)
        return left

    def break_group(self, quorum_id: int, reason: str) -> None:
        """See Control."""
        if self._group.waiting.broke(quorum_id, reason):
            self._group.post(ev.RankBroke(0, quorum_id, reason))

    def drain(self, reason: str) -> None:
        """See Control."""
        self._group.post(ev.DrainOrdered(reason))

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """See Control."""
        self._group.shutdown(timeout_s)


class RankControl(ReportingStream[codec.RankAsk, "Verdict | Order"]):
    """Group rank > 0. `settings.address` is the LeaderControl's `address`.

    What follows when the leader is away, `protocol.group.follower` says: the handler is sent Lost, an order to end, or
    a Refusal. A timer's thread asks it.
    """

    _method = f"/{GROUP}/Join"
    _waits_for_a_frozen_server = False
    _other = "group rank 0"
    _me = "this rank"
    _advice = "check that group rank 0 runs, and that its host and port can be reached (FT_HOSTNAME, FT_MANAGER_PORT)"

    def __init__(self, settings: LeaseSettings, handler: PushHandler, *, rank: int, world_size: int) -> None:
        super().__init__(replace(settings, tls=group_tls(settings)), handler)
        self._join = Join(settings.replica_id, rank, world_size, secrets.randbits(63) | 1)
        self._waiting = Waiting(settings.replica_id, settings.budget.grace_s)
        budget = settings.budget
        self._follower = Follower(
            FollowerSettings(settings.replica_id, rank, budget.grace_s, budget.liveness_s, budget.connect_s)
        )
        self._drain: Order | None = None
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """See Control."""
        super().start()
        with self._changed:
            if not self.connected:
                self._follower.started(time.monotonic())
            self._set_timer()

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """See Control."""
        message = codec.RankAsk(ask, room or "")
        data = self._encode(message)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._open_ask = message
            self._follower.asks(ask.seq, moves=ask.moves)
            self._send(data)

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """See Control."""
        self._vote(verdict)
        return self._waiting.wait(verdict, timeout_s, self._vote)

    def _vote(self, vote: Verdict) -> None:
        data = self._encode(vote)
        with self._changed:
            self._follower.votes(vote)
            self._send(data)

    def break_group(self, quorum_id: int, reason: str) -> None:
        """See Control."""
        if self._waiting.broke(quorum_id, reason):
            data = self._encode(codec.Broken(quorum_id, reason))
            with self._changed:
                self._send(data)

    def drain(self, reason: str) -> None:
        """See Control. The leader tells it to all ranks, also to this one; without a way to it this rank is alone."""
        with self._changed:
            order = self._drain = Order(kill=False, reason=reason)
            self._send(self._encode(order))
            alone = not self.connected
        if alone:
            self._handler.on_push(order)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """See Control."""
        with self._changed:
            if self._timer is not None:
                self._timer.cancel()
        super().shutdown(timeout_s)

    # ------------------------------------------------------------ the stream

    def _opening(self) -> bytes:
        return codec.encode_join(self._join, release())

    def _encode(self, message: codec.RankAsk | Verdict | Order | codec.Renewal | codec.Broken | Left) -> bytes:
        return codec.encode_rank(message)

    def _still_open(self) -> tuple[codec.RankAsk | Verdict | Order | None, ...]:
        return self._drain, self._open_ask, self._follower.vote

    def _can_part(self) -> bool:
        return self.connected

    def _on_open(self, welcome: Welcome) -> None:  # noqa: ARG002
        with self._changed:
            self._follower.opened()
            self._set_timer()

    def _on_down(self) -> None:
        with self._changed:
            now = time.monotonic()
            self._follower.ended(now, now - self.heard_at)
            self._set_timer()

    def _set_timer(self) -> None:
        """Called with the lock held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._follower.next_at
        if at is not None and not self._stopping:
            self._timer = threading.Timer(max(0.0, at - time.monotonic()), self._look)
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        """What follows from the leader's absence, if it is still away."""
        while True:
            with self._changed:
                if self.connected or self._stopping or not self._wanted or self._fatal is not None:
                    return
                said = self._follower.due(time.monotonic())
                if said is None:
                    self._set_timer()
                    return
            match said:
                case Broken():
                    if self._waiting.broke(said.quorum_id, said.reason):
                        self._handler.on_push(said.told(self.settings.replica_id))
                case Order():
                    self._handler.on_push(said)
                case Unreachable():
                    self._refuse(RefusedError(self._unreachable(f"within {said.for_s:g} s")))

    def _on_push(self, push: Push) -> None:
        with self._changed:
            if not self._follower.took(push):
                return
            if isinstance(push, Answer):
                self._open_ask, self.last_reason = None, ""
            elif isinstance(push, Reason):
                self.last_reason = push.text
        self._waiting.take(push)
        if not isinstance(push, Verdict):
            self._handler.on_push(push)
