"""The trainer's end of a lease with the lighthouse.

How it works. `lasting_stream.StreamClient` keeps the stream open; this says what travels on it. Asks are irrevocable
(R14): an open ask is presented again after every reconnect, with the same seq, until it is answered or replaced.
Progress is a few attribute stores; the stream's renewals carry it.

Threads: as in `lasting_stream`; the handler is called on the lease thread, one call at a time.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from ft_core.protocol.lighthouse.events import Left, Progress
from ft_core.protocol.types import UNTRAINED, VOID, Ask, Version
from ft_core.rpc import codec
from ft_core.rpc.channel import LIGHTHOUSE, release
from ft_core.rpc.lasting_stream import LeaseSettings, StreamClient
from ft_core.rpc.lease_handler import LeaseHandler, Peers, deliver

__all__ = ["LeaseClient", "LeaseHandler", "LeaseSettings", "Peers"]


class LeaseClient(StreamClient):
    """Keeps one lease with the lighthouse.

    Args:
        settings: address, replica and durations. A wrong address form raises ConfigError here.
        handler: is told everything; called one at a time on the lease thread.
    """

    _method = f"/{LIGHTHOUSE}/Lease"
    _other = "the lighthouse"
    _advice = "check the address, and that ft-lighthouse runs there and its port is open"

    def __init__(self, settings: LeaseSettings, handler: LeaseHandler) -> None:
        super().__init__(settings, handler)
        self._room = settings.room
        self._quorum_room = ""
        """Where the quorum that the handler presents was formed; it means nothing in another room."""
        self._open_ask: Ask | None = None
        self._incomplete: codec.Broken | None = None
        """What was reported since the last ask: a rank of this group is missing."""
        self._goodbye: Left | None = None
        self._left = False
        self._incarnation = secrets.randbits(63) | 1
        self._doing: tuple[int, str, Version, float] = (0, "", VOID, 0.0)

    # ------------------------------------------------------------ public

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """Ask for the next quorum; thread-safe, returns at once; the answer comes through `on_quorum(ask.seq, ...)`.

        Asking in another room leaves the present one; asking after `leave` opens a new lease.

        Raises:
            ConfigError: the ask cannot be sent.
            RefusedError, JobFinishedError, ProtocolError, ConfigError: the lease was refused for good before.
        """
        data = codec.encode_ask(ask)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._open_ask, self._incomplete = ask, None
            if room is not None and room != self._room:
                moves = Left(ask.replica_id, 0, f"moves to room {room!r}", finished=False, version=VOID, agreed=False)
                self._send(codec.encode_left(moves), last=True)
                self._room = room
            else:
                self._send(data)
            self._goodbye, self._left = None, False
            self._wanted, self._parting = True, False
            self._changed.notify_all()

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """Note where training is; cheap. `paused_s` > 0: busy for at most that long; its changes are sent at once.

        So is the first trained state that became stable: without it the lighthouse takes this replica for one that
        has nothing to lose, and forms a quorum of newcomers should the connection close now (R2).
        """
        was = self._doing[3]
        first = self._doing[2] <= UNTRAINED < stable
        until = time.monotonic() + paused_s if paused_s > 0 else 0.0
        self._doing = (step, phase, stable, until)
        if first or (until != was and (until > 0) != (was > time.monotonic())) or paused_s > 0:
            with self._changed:
                self._renew_now()

    def report_incomplete(self, quorum_id: int, reason: str) -> None:
        """A rank of this group is missing: it left `quorum_id`, and nobody waits for it before the next `ask`."""
        report = codec.Broken(quorum_id, reason)
        data = codec.encode_incomplete(report)
        with self._changed:
            self._incomplete = report
            self._send(data)

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        """Say goodbye and close the lease; True if the lighthouse acknowledged it within `timeout_s`.

        Args:
            reason: for logs.
            finished: training is over, the room stays closed for latecomers (R16).
            version: the state this replica leaves with.
            agreed: the other members know, change-wanted rode in the last fence.
            timeout_s: with an unreachable lighthouse, how long to wait for it.
            over: the script has ended by itself, so nobody misses this state (R21).
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._open_ask = None
            if self._fatal is not None or not self._ever_connected or self._thread is None:
                self._wanted = False
                self._close_stream()
                return False
            if not self._left:
                self._parting = True
                self._goodbye = Left(self.settings.replica_id, 0, reason, finished, version, agreed, over)
                self._send(codec.encode_left(self._goodbye), last=True)
            while not self._left and not self._stopping and self._fatal is None:
                wait_s = deadline - time.monotonic()
                if wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            self._wanted = False
            self._goodbye = None
            self.connected = False
            self._close_stream()
            return self._left

    # ------------------------------------------------------------ the stream

    def _opening(self) -> bytes:
        hello = self._handler.hello()
        changes: dict[str, object] = {}
        if hello.incarnation == 0:
            changes["incarnation"] = self._incarnation
        if not hello.name:
            changes["name"] = hello.replica_id.rpartition(":")[0] or hello.replica_id
        if self._quorum_room and self._quorum_room != self._room:
            changes.update(quorum_id=0, members=())
        until = self._doing[3]
        changes["paused_s"] = max(0.0, until - time.monotonic()) if until else 0.0
        return codec.encode_hello(replace(hello, **changes), self._room, release())  # type: ignore[arg-type]

    def _decode(self, data: bytes) -> codec.Push | None:
        return codec.decode_lease_push(data)

    def _renewal(self, now: float) -> bytes:
        step, phase, stable, until = self._doing
        paused_s = max(0.0, until - now) if until else 0.0
        return codec.encode_renewal(codec.Renewal(now, Progress("", 0, step, phase, stable, paused_s)))

    def _resend(self) -> list[bytes]:
        out = [codec.encode_ask(self._open_ask)] if self._open_ask is not None else []
        if self._incomplete is not None:
            out.append(codec.encode_incomplete(self._incomplete))
        if self._goodbye is not None:
            out.append(codec.encode_left(self._goodbye))
        return out

    def _on_open(self, welcome: codec.Welcome) -> None:
        self._handler.on_welcome(welcome.peers)

    def _on_acked(self, acked: codec.Acked) -> None:
        super()._on_acked(acked)
        if acked.clock_s == 0.0:
            with self._changed:
                self._left = self._goodbye is not None
                if self._left:
                    self._wanted = False  # the lighthouse ends the stream now: not to be opened again
                self._changed.notify_all()

    def _on_push(self, push: codec.Push) -> None:
        if isinstance(push, codec.Answer):
            with self._changed:
                if self._open_ask is None or self._open_ask.seq != push.seq:
                    return
                self._open_ask = None
                self._quorum_room = self._room
                self.last_reason = ""
        elif isinstance(push, codec.Reason):
            self.last_reason = push.text
        deliver(self._handler, push)
