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
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ft_core.control.group.pending_votes import Waiting
from ft_core.control.group.server import GroupServer
from ft_core.control.group.tls import group_tls
from ft_core.control.lighthouse.lease_client import LeaseClient
from ft_core.errors import RefusedError
from ft_core.protocol.group import events as ev
from ft_core.protocol.group.ranks import Join
from ft_core.protocol.pushes import Answer, Lost, Order, Reason
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
        self._group = GroupServer(settings, handler, world_size=world_size, host="::", port=port, drains=drains)
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
        return self._group.lease.leave(reason, finished, version, agreed, timeout_s, over)

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

    If the leader cannot be reached within the budget's connect_s after `start`, or its stream is lost for as long,
    the handler is sent a Refusal.
    """

    _method = f"/{GROUP}/Join"
    _other = "group rank 0"
    _me = "this rank"
    _advice = "check that group rank 0 runs, and that its host and port can be reached (FT_HOSTNAME, FT_MANAGER_PORT)"

    def __init__(self, settings: LeaseSettings, handler: PushHandler, *, rank: int, world_size: int) -> None:
        super().__init__(replace(settings, tls=group_tls(settings)), handler)
        self._join = Join(settings.replica_id, rank, world_size, secrets.randbits(63) | 1)
        self._waiting = Waiting(settings.replica_id, settings.budget.grace_s)
        self._open_vote: Verdict | None = None
        self._drain: Order | None = None
        self._quorum_id = 0
        self._deadline: threading.Timer | None = None

    def start(self) -> None:
        """See Control."""
        super().start()
        self._expect_leader(self.settings.budget.connect_s)

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """See Control."""
        message = codec.RankAsk(ask, room or "")
        data = self._encode(message)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._open_ask = message
            self._send(data)

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """See Control."""
        self._vote(verdict)
        return self._waiting.wait(verdict, timeout_s, self._vote)

    def _vote(self, vote: Verdict) -> None:
        data = self._encode(vote)
        with self._changed:
            self._open_vote = vote
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
            if self._deadline is not None:
                self._deadline.cancel()
        super().shutdown(timeout_s)

    # ------------------------------------------------------------ the stream

    def _opening(self) -> bytes:
        return codec.encode_join(self._join, release())

    def _encode(self, message: codec.RankAsk | Verdict | Order | codec.Renewal | codec.Broken | Left) -> bytes:
        return codec.encode_rank(message)

    def _still_open(self) -> tuple[codec.RankAsk | Verdict | Order | None, ...]:
        return self._drain, self._open_ask, self._open_vote

    def _can_part(self) -> bool:
        return self.connected

    def _on_open(self, welcome: Welcome) -> None:  # noqa: ARG002
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
                    self._handler.on_push(Lost(quorum_id, (self.settings.replica_id,)))
                self._expect_leader(self.settings.budget.connect_s)
            else:
                self._refuse(RefusedError(self._unreachable(f"within {within_s:g} s")))

        with self._changed:
            if self._stopping:
                return
            self._deadline = threading.Timer(within_s, late)
            self._deadline.daemon = True
            self._deadline.start()

    def _on_push(self, push: Push) -> None:
        match push:
            case Answer():
                with self._changed:
                    if self._open_ask is None or self._open_ask.ask.seq != push.seq:
                        return
                    self._open_ask = None
                    if self._quorum_id != push.quorum.quorum_id:  # else the same answer, once more
                        self._open_vote, self._quorum_id = None, push.quorum.quorum_id
                    self.last_reason = ""
            case Verdict():
                with self._changed:
                    vote = self._open_vote
                    if vote is not None and (vote.quorum_id, vote.attempt) == (push.quorum_id, push.attempt):
                        self._open_vote = None
            case Reason():
                self.last_reason = push.text
            case _:
                pass
        self._waiting.take(push)
        if not isinstance(push, Verdict):
            self._handler.on_push(push)
