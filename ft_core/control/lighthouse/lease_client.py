"""The trainer's end of a lease with the lighthouse.

How it works. `lasting_stream.StreamClient` keeps the stream open; this says what travels on it. Asks are irrevocable
(R14): an open ask is presented again after every reconnect, with the same seq, until it is answered or replaced.

Threads: as in `lasting_stream`; the handler is called on the lease thread, one call at a time.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import Left
from ft_core.protocol.pushes import Answer, Reason
from ft_core.protocol.types import VOID, Ask
from ft_core.rpc import codec
from ft_core.rpc.channel import LIGHTHOUSE, release
from ft_core.rpc.lasting_stream import LeaseSettings, PushHandler
from ft_core.rpc.reporting_stream import ReportingStream

if TYPE_CHECKING:
    from ft_core.protocol.pushes import Push, Welcome

__all__ = ["LeaseClient", "LeaseSettings", "PushHandler"]


class LeaseClient(ReportingStream[Ask, codec.Broken]):
    """Keeps one lease with the lighthouse.

    Args:
        settings: address, replica and durations. A wrong address form raises ConfigError here.
        handler: is told everything; called one at a time on the lease thread.
    """

    _method = f"/{LIGHTHOUSE}/Lease"
    _other = "the lighthouse"
    _me = "this trainer"
    _advice = "check the address, and that ft-lighthouse runs there and its port is open"

    def __init__(self, settings: LeaseSettings, handler: PushHandler) -> None:
        super().__init__(settings, handler)
        self._room = settings.room
        self._quorum_room = ""
        """Where the quorum that the handler presents was formed; it means nothing in another room."""
        self._incomplete: codec.Broken | None = None
        """What was reported since the last ask: a rank of this group is missing."""
        self._incarnation = secrets.randbits(63) | 1

    # ------------------------------------------------------------ public

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """Ask for the next quorum; thread-safe, returns at once; the answer comes as `Answer(ask.seq, ...)`.

        Asking in another room leaves the present one; asking after `leave` opens a new lease.

        Raises:
            ConfigError: the ask cannot be sent.
            RefusedError, JobFinishedError, ProtocolError, ConfigError: the lease was refused for good before.
        """
        data = self._encode(ask)
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._open_ask, self._incomplete = ask, None
            if room is not None and room != self._room:
                moves = Left(ask.replica_id, 0, f"moves to room {room!r}", finished=False, version=VOID, agreed=False)
                self._send(self._encode(moves), last=True)
                self._room = room
            else:
                self._send(data)
            self._goodbye, self._left = None, False
            self._wanted, self._parting = True, False
            self._changed.notify_all()

    def report_incomplete(self, quorum_id: int, reason: str) -> None:
        """A rank of this group is missing: it left `quorum_id`, and nobody waits for it before the next `ask`."""
        report = codec.Broken(quorum_id, reason)
        data = self._encode(report)
        with self._changed:
            self._incomplete = report
            self._send(data)

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
        changes["paused_s"] = self._paused_s(time.monotonic())
        return codec.encode_hello(replace(hello, **changes), self._room, release())  # type: ignore[arg-type]

    def _encode(self, message: Ask | codec.Broken | codec.Renewal | Left) -> bytes:
        return codec.encode_lease(message)

    def _still_open(self) -> tuple[Ask | codec.Broken | None, ...]:
        return self._open_ask, self._incomplete

    def _can_part(self) -> bool:
        return self._ever_connected and self._thread is not None

    def _on_open(self, welcome: Welcome) -> None:
        self._handler.on_push(welcome)

    def _on_push(self, push: Push) -> None:
        if isinstance(push, Answer):
            with self._changed:
                if self._open_ask is None or self._open_ask.seq != push.seq:
                    return
                self._open_ask = None
                self._quorum_room = self._room
                self.last_reason = ""
        elif isinstance(push, Reason):
            self.last_reason = push.text
        self._handler.on_push(push)
