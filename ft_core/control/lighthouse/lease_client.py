"""The trainer's end of a lease with the lighthouse.

How it works. `lasting_stream.StreamClient` keeps the stream open; this says what travels on it. Asks are irrevocable
(R14): an open ask is presented again after every reconnect, with the same seq, until it is answered or replaced.

A lighthouse that is silent, also when it was to open the lease, is waited for: it loses nobody if it only stood still.
But where there are two, the other one is asked meanwhile, once every LOOK_EVERY_S; if it is active, it has taken over,
and the silent one is left for it.

Threads: as in `lasting_stream`; the handler is called on the lease thread, one call at a time. "ft-lease-look" asks the
other lighthouse, and ends.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.addresses import Addresses
from ft_core.control.lighthouse.lighthouse_channel import is_active
from ft_core.protocol.lighthouse.events import Left
from ft_core.protocol.pushes import Answer, Reason
from ft_core.protocol.types import VOID, Ask
from ft_core.rpc import codec
from ft_core.rpc.channel import LIGHTHOUSE, release
from ft_core.rpc.lasting_stream import LeaseSettings, PushHandler, is_silent
from ft_core.rpc.reporting_stream import ReportingStream

if TYPE_CHECKING:
    from ft_core.protocol.pushes import Push, Welcome
    from ft_core.rpc.lasting_stream import _Outgoing

__all__ = ["LeaseClient", "LeaseSettings", "PushHandler"]


_log = logging.getLogger("ft_core")
LOOK_EVERY_S = 1.0
LOOK_S = 0.8
"""How long the other lighthouse may take to answer."""


def look_elsewhere(now: float, heard_at: float, renew_s: float, looked_at: float) -> bool:
    """Whether to ask the other lighthouse now. Pure."""
    return is_silent(now, heard_at, renew_s) and now - looked_at >= LOOK_EVERY_S


class LeaseClient(ReportingStream[Ask, codec.Broken]):
    """Keeps one lease with the lighthouse.

    Args:
        settings: address, replica and durations. A wrong address form raises ConfigError here.
        handler: is told everything; called one at a time on the lease thread.
    """

    _read_addresses = staticmethod(Addresses.parse)
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
        self._looked_at = float("-inf")
        self._looking: threading.Thread | None = None
        self._warned = False
        """It has said that one of two lighthouses is none of a pair."""

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

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """As StreamClient's."""
        super().shutdown(timeout_s)
        looking = self._looking
        if looking is not None:
            looking.join(2 * LOOK_S)

    # ------------------------------------------------------------ a lighthouse that is silent

    def _while_waiting(self, outgoing: _Outgoing, now: float) -> float:
        if len(self._addresses) == 1:
            return math.inf
        heard_at = max(self.heard_at, self._opening_sent)
        idle = self._looking is None or not self._looking.is_alive()
        if idle and look_elsewhere(now, heard_at, self._renew_s, self._looked_at):
            self._looked_at = now
            self._looking = threading.Thread(
                target=self._look, args=(outgoing, heard_at), name="ft-lease-look", daemon=True
            )
            self._looking.start()
        return LOOK_EVERY_S

    def _look(self, silent: _Outgoing, heard_at: float) -> None:
        other = self._addresses.all[(self._turn.index + 1) % len(self._addresses)]
        try:
            if not is_active(other, self.settings.setting, self._tls, self._metadata, LOOK_S):
                return
        except Exception:  # noqa: BLE001 - logged
            _log.exception(
                "%s: %s could not be asked whether it is active, by a mistake of ours (please report it); it is asked "
                "again", self.settings.replica_id, other,
            )  # fmt: skip
            return
        with self._changed:
            if self._outgoing is silent and max(self.heard_at, self._opening_sent) == heard_at:
                self._close_stream(f"silent for {time.monotonic() - heard_at:.1f} s, and {other} is active")

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
        if len(self._addresses) > 1 and not welcome.of_pair and not self._warned:
            self._warned = True
            _log.warning(
                "%s: the lighthouse at %s runs without --peer, and there is another one in %s: groups that reach "
                "only one of them would train beside the others, and lose what they have trained. Start each "
                "with --peer and the address of the other (docs/high-availability.md)",
                self.settings.replica_id, self._addresses.all[self._turn.index], self.settings.address,
            )  # fmt: skip
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
