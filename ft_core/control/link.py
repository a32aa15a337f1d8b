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
from typing import Protocol

from ft_core.control.group.pending_votes import Waiting
from ft_core.control.group.ranks import group_tls
from ft_core.control.group.server import GroupServer
from ft_core.control.lighthouse.lease_client import LeaseClient, LeaseHandler, LeaseSettings
from ft_core.errors import RefusedError
from ft_core.protocol.lighthouse.events import Left, Progress
from ft_core.protocol.types import VOID, Ask, Verdict, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import GROUP, join_host, reachable_host, release
from ft_core.rpc.lasting_stream import StreamClient
from ft_core.rpc.lease_handler import deliver


class Control(Protocol):
    """One rank's view of the control plane, the same for all ranks of a group. Answers come through its LeaseHandler.

    On ranks > 0 only these handler methods are called: on_quorum, on_reason, on_change_pending, on_member_lost,
    on_paused, on_superseded, on_refused, on_drain, on_kill (hello and on_welcome only on group rank 0).
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

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        """Say goodbye; True if it was acknowledged."""

    def break_group(self, quorum_id: int, reason: str) -> None:
        """This rank is broken in `quorum_id`: tell the group's other ranks. Never blocks."""

    def drain(self, reason: str) -> None:
        """This rank is to drain: every rank of the group hears it through `on_drain`. Never blocks."""

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
        self._handler.on_drain(reason)


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
        self, settings: LeaseSettings, handler: LeaseHandler, *, world_size: int, hostname: str = "", port: int = 0,
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
        self._group.post_ask(0, ask, room)

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """See Control."""
        self._group.post_vote(0, verdict)
        return self._group.waiting.wait(verdict, timeout_s, self._group.settings.replica_id)

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """See Control."""
        self._group.local_progress(step, phase, stable, paused_s)

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        """The group leaves when its rank 0 does."""
        return self._group.lease.leave(reason, finished, version, agreed, timeout_s, over)

    def break_group(self, quorum_id: int, reason: str) -> None:
        """See Control."""
        self._group.post_break(0, quorum_id, reason)

    def drain(self, reason: str) -> None:
        """See Control."""
        self._group.post_drain(reason)

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
        super().__init__(replace(settings, tls=group_tls(settings)), handler)
        self._join = codec.Join(settings.replica_id, rank, world_size, secrets.randbits(63) | 1)
        self._waiting = Waiting()
        self._open_ask: codec.RankAsk | None = None
        self._open_vote: Verdict | None = None
        self._drain: codec.Order | None = None
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
        message = codec.RankAsk(ask, room or "")
        data = codec.encode_rank(message)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._open_ask = message
            self._send(data)

    def vote(self, verdict: Verdict, timeout_s: float) -> Verdict:
        """See Control."""
        data = codec.encode_rank(verdict)
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

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        """See Control."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._open_ask = None
            if self._fatal is None and self.connected:
                self._leaving = Left(self.settings.replica_id, 0, reason, finished, version, agreed, over)
                self._parting = True
                self._send(codec.encode_rank(self._leaving), last=True)
                self._changed.wait_for(
                    lambda: self._left or self._stopping or not self.connected, deadline - time.monotonic()
                )
            self._wanted = False
            self._close_stream()
            return self._left

    def break_group(self, quorum_id: int, reason: str) -> None:
        """See Control."""
        if self._waiting.broke(quorum_id, reason):
            data = codec.encode_rank(codec.Broken(quorum_id, reason))
            with self._changed:
                self._send(data)

    def drain(self, reason: str) -> None:
        """See Control. The leader tells it to all ranks, also to this one; without a way to it this rank is alone."""
        with self._changed:
            self._drain = codec.Order(kill=False, reason=reason)
            self._send(codec.encode_rank(self._drain))
            alone = not self.connected
        if alone:
            self._handler.on_drain(reason)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """See Control."""
        with self._changed:
            if self._deadline is not None:
                self._deadline.cancel()
        super().shutdown(timeout_s)

    # ------------------------------------------------------------ the stream

    def _opening(self) -> bytes:
        return codec.encode_join(self._join, release())

    def _decode(self, data: bytes) -> codec.Push | None:
        return codec.decode_group_push(data)

    def _renewal(self, now: float) -> bytes:
        step, phase, stable, until = self._doing
        paused_s = max(0.0, until - now) if until else 0.0
        return codec.encode_rank(codec.Renewal(now, Progress("", 0, step, phase, stable, paused_s)))

    def _resend(self) -> list[bytes]:
        open_ = [self._drain, self._open_ask, self._open_vote, self._leaving]
        return [codec.encode_rank(message) for message in open_ if message is not None]

    def _on_open(self, welcome: codec.Welcome) -> None:  # noqa: ARG002
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

    def _on_acked(self, acked: codec.Acked) -> None:
        super()._on_acked(acked)
        if acked.clock_s == 0.0:
            with self._changed:
                self._left = self._leaving is not None
                if self._left:
                    self._wanted = False  # rank 0 ends the stream now: not to be opened again
                self._changed.notify_all()

    def _on_push(self, push: codec.Push) -> None:
        match push:
            case codec.Answer():
                with self._changed:
                    if self._open_ask is None or self._open_ask.ask.seq != push.seq:
                        return
                    self._open_ask = self._open_vote = None
                    self._quorum_id = push.quorum.quorum_id
                    self.last_reason = ""
                self._waiting.new_quorum()
            case Verdict():
                with self._changed:
                    vote = self._open_vote
                    if vote is not None and (vote.quorum_id, vote.attempt) == (push.quorum_id, push.attempt):
                        self._open_vote = None
                self._waiting.decided(push)
                return
            case codec.Lost() if self.settings.replica_id in push.lost:
                self._waiting.broke(push.quorum_id, "another rank of this group is broken")
            case codec.Reason():
                self.last_reason = push.text
            case codec.Busy():
                self._waiting.paused(push.replica_id, push.for_s)
            case _:
                pass
        deliver(self._handler, push)
