"""A bidirectional stream that is kept open whatever happens to the network or to the other side.

How it works. `StreamClient` connects, sends an opening message, hands on what arrives, and when the stream ends it
starts afresh with a new channel, after a pause that grows from nothing to `reconnect_s`. Of two addresses it stays with
the one that took it until that one ends, and then goes on to the other (`addresses.Turn`); at once, unless that one
answered until the connection broke: then it is tried once more first. Subclasses say what is sent
and what arrivals mean: `lease_client.LeaseClient` towards the lighthouse, `link.RankControl` towards group rank 0
(what these have in common is in `reporting_stream`).

The stream is renewed every `progress_s`, or four times per liveness timeout if that is more often, because silence is
what tells a frozen process from a closed one; less often where the other side has so many that it asks for that.
`last_ack` (R3) is when the newest *acknowledged* message was sent, not when its acknowledgement was read: a process
that was frozen for an hour finds an old acknowledgement in its socket buffer, and must not take it for a lease.

Threads: `ft-lease` connects, reads and calls the handler, one call at a time; gRPC's own thread runs `_Outgoing`, which
takes messages from the outbox or makes renewals. Public methods may be called from any thread; they take one lock for a
few assignments. HTTP/2 keepalives are answered by gRPC's C core, without the GIL and without any of these threads.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ft_core.addresses import STANDBY, Addresses, Turn
from ft_core.errors import ConfigError, LighthouseError, ProtocolError, RefusedError
from ft_core.protocol.pushes import Acked, Refusal, Welcome
from ft_core.rpc import codec
from ft_core.rpc.absence import Absence
from ft_core.rpc.channel import Tls, check_schemes, explain, grpc, open_channel, status_of, token_metadata
from ft_core.settings import parse_address
from ft_core.tls_diagnosis import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.pushes import Push
    from ft_core.settings import TimeBudget

BACKOFF_S = 0.02
"""First pause between two rounds of attempts to connect; doubles up to the budget's reconnect_s."""
STEADY_S = 1.0
"""A stream that lived this long was a good one: if it ends, the next attempts are made at once and the reason is
news."""
SILENT_RENEWALS = 2
SILENT_S = 0.5
"""Another side of which nothing was received for so many renewals and seconds is silent."""
MAX_OUTBOX = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseSettings:
    """How to reach the lighthouse (or, for ranks > 0, the group's leader), and who asks. Durations come from
    `budget`."""

    address: str
    """host:port or http://host:port; of a lighthouse and of one that stands by for it, both, with a comma between."""
    replica_id: str
    budget: TimeBudget
    room: str = "default"
    token: str = field(default="", repr=False)
    tls: Tls | None = None
    """None: what FT_TLS_* say."""
    setting: str = "lighthouse_addr (FT_LIGHTHOUSE)"
    """What to call the address in messages."""
    healed: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Bytes of state received in the heal that is under way, and of all of it; (0, 0): there is none. Cheap."""


def is_silent(now: float, heard_at: float, renew_s: float) -> bool:
    """Whether the other side has not answered for longer than it should take. Pure."""
    return now - heard_at > SILENT_RENEWALS * renew_s + SILENT_S


class PushHandler(Protocol):
    """Whom pushes are for. Called one at a time, on a control-plane thread; must not block for long or raise."""

    def hello(self) -> Hello:
        """What to present now (called at every connect). generation, incarnation (if 0) and liveness_s are filled
        in."""

    def on_push(self, push: Push) -> None:
        """Something arrived; a Refusal is final. Lost and Busy under the own replica_id: a rank of this group."""


class _Outgoing:
    """The request iterator of one stream, run by a thread of gRPC's."""

    def __init__(self, client: StreamClient, opening: bytes) -> None:
        self._client = client
        self.first: bytes | None = opening
        self.open = False
        """The other side has answered the opening; only then anything else is sent."""
        self.closed = False
        self.parting = False
        """A goodbye was sent on it: that it ends is no news."""
        self.left_because = ""
        """It was closed here, to go on to the next address, and why."""
        self.renew_at = 0.0

    def __iter__(self) -> _Outgoing:
        return self

    def __next__(self) -> bytes:
        client = self._client
        with client._changed:
            while not self.closed:
                if self.first is not None:
                    first, self.first = self.first, None
                    return first
                if self.open and client._outbox:
                    return client._outbox.popleft()
                now = time.monotonic()
                wait_s = client._while_waiting(self, now)
                if self.open:
                    if now >= self.renew_at:
                        self.renew_at = now + client._renew_s
                        return client._renewal(now)
                    wait_s = min(self.renew_at - now, wait_s)
                client._changed.wait(None if wait_s == math.inf else wait_s)
        raise StopIteration


class StreamClient(ABC):
    """A bidirectional stream that is re-opened whenever it ends, until `shutdown` or a final refusal.

    Subclasses say what is sent and what arrivals mean; see the module's header for threads.
    """

    last_ack: float
    """time.monotonic() at which the newest message was *sent* that the other side has acknowledged; -inf before."""
    connected: bool
    last_reason: str
    """Why there is no quorum, or why the stream is not open; '' if neither."""

    _waits_for_a_frozen_server = True
    """One that does not answer keepalives is given up after tens of seconds only; else after the liveness timeout."""
    _read_addresses = staticmethod(Addresses.one)
    _method: str
    _other: str
    """Who is at the other end, for messages."""
    _me: str
    """Who is at this end, for messages."""
    _advice: str

    def __init__(self, settings: LeaseSettings, handler: PushHandler) -> None:
        self.settings = settings
        self._addresses = self._read_addresses(settings.address, settings.setting)
        self.last_ack = float("-inf")
        self.connected = False
        self.last_reason = ""
        self._handler = handler
        self._metadata = token_metadata(settings.token)
        self._tls = settings.tls or Tls.from_env(os.environ)
        check_schemes(self._addresses, self._tls)
        if self._tls is not None:
            self._tls.files().look()  # what cannot work is an error here, and no reason to try for ever
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._outbox: deque[bytes] = deque()
        self._outgoing: _Outgoing | None = None
        self._call: grpc.Call | None = None
        self._thread: threading.Thread | None = None
        self._wanted = True
        self._parting = False
        """A goodbye is being said (set before it is sent): that the stream ends, or cannot be re-opened, is no news."""
        self._stopping = False
        self._fatal: Exception | None = None
        self._ever_connected = False
        self._turn = Turn(len(self._addresses))
        """Of the lease thread, as the next one."""
        self._absence = Absence(self._other, self._addresses)
        self._opening_sent = 0.0
        self.heard_at = float("-inf")
        """time.monotonic() at which something arrived last. An open stream brings an answer to each renewal."""
        self._certificates = {
            one: Diagnosis(self._tls, *parse_address(one, settings.setting)) for one in self._addresses.all
        }
        self._renew_s = self._usual_s = settings.budget.progress_s

    def __repr__(self) -> str:
        state = "connected" if self.connected else ("refused" if self._fatal else "not connected")
        because = f", {self.last_reason}" if self.last_reason else ""
        return f"{type(self).__name__}({self.settings.replica_id} -> {self.settings.address}, {state}{because})"

    # ------------------------------------------------------------ what subclasses say

    @abstractmethod
    def _opening(self) -> bytes:
        """The first message."""

    @abstractmethod
    def _renewal(self, now: float) -> bytes:
        """The message that renews the stream. Called with the lock held."""

    @abstractmethod
    def _resend(self) -> list[bytes]:
        """What is still open and has to be presented on a new stream. Called with the lock held."""

    @abstractmethod
    def _on_push(self, push: Push) -> None:
        """Everything but Welcome, Refusal and Acked."""

    def _while_waiting(self, outgoing: _Outgoing, now: float) -> float:  # noqa: ARG002
        """There is nothing to send on a stream. Returns after how long to call this again; with the lock held."""
        return math.inf

    def _on_open(self, welcome: Welcome) -> None:  # noqa: B027 - optional
        """The stream is open."""

    def _on_acked(self, acked: Acked) -> None:
        """Something was acknowledged."""
        if acked.clock_s > 0:
            self.last_ack = max(self.last_ack, acked.clock_s - acked.lease_age_s)
            self._renew_s = max(self._usual_s, min(acked.renew_s, self.settings.budget.progress_s))

    def _on_down(self) -> None:  # noqa: B027 - optional
        """The stream ended and will be re-opened."""

    # ------------------------------------------------------------ public

    def start(self) -> None:
        """Start the thread and begin to connect; returns at once. Again: no effect."""
        with self._changed:
            if self._thread is not None or self._stopping:
                return
            self._absence.began(time.monotonic())
            self._thread = threading.Thread(target=self._run, name="ft-lease", daemon=True)
            self._thread.start()

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the stream was open for the first time.

        Raises:
            RefusedError, JobFinishedError, ProtocolError, ConfigError: the other side refused.
            LighthouseError: it did not answer in time; the message names the setting, the address and what to do.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._ever_connected:
                if self._fatal is not None:
                    raise self._fatal
                left = deadline - time.monotonic()
                if left <= 0 or self._stopping:
                    raise LighthouseError(self._unreachable(f"within {timeout_s:g} s"))
                self._changed.wait(left)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Close the stream without a goodbye (unless one was said) and end the threads. Idempotent, bounded."""
        with self._changed:
            self._stopping = True
            thread, self._thread = self._thread, None
            self._close_stream()
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning("the lease thread did not end within %.1f s", timeout_s)

    # ------------------------------------------------------------ sending (lock held)

    def _send(self, data: bytes, *, last: bool = False) -> None:
        """Queue a message for the stream that is open now; what has to survive a reconnect belongs in `_resend`.

        `last`: a goodbye, which the other side answers by ending the stream.
        """
        if self._outgoing is None or not self._outgoing.open:
            return
        self._outgoing.parting |= last
        if len(self._outbox) >= MAX_OUTBOX:
            # Nothing has left for many messages: the stream is stuck. A new one presents what is still open.
            self._close_stream()
            return
        self._outbox.append(data)
        self._changed.notify_all()

    def _renew_now(self) -> None:
        if self._outgoing is not None:
            self._outgoing.renew_at = 0.0
            self._changed.notify_all()

    def _close_stream(self, left_because: str = "") -> None:
        if self._outgoing is not None:
            self._outgoing.closed, self._outgoing.left_because = True, left_because
        if self._call is not None:
            self._call.cancel()

    # ------------------------------------------------------------ the lease thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._turn.pause_s > 0 and not self._stopping:
                    self._changed.wait_for(lambda: self._stopping, self._turn.pause_s)
                self._changed.wait_for(lambda: self._stopping or (self._wanted and self._fatal is None))
                if self._stopping:
                    return
            steady, stay = self._converse(self._addresses.all[self._turn.index])
            self._turn = self._turn.ended(
                steady=steady, first_s=BACKOFF_S, most_s=self.settings.budget.reconnect_s, stay=stay
            )

    def _converse(self, address: str) -> tuple[bool, bool]:
        """One stream from opening to end. Whether it was open for a while, and whether the other side is still there,
        as far as is known: this side wanted the end, or stumbled, or it answered until the connection broke."""
        settings = self.settings
        opened_at = math.inf
        channel: grpc.Channel | None = None
        outgoing: _Outgoing | None = None
        why, ours, broke = f"{self._other} closed the connection", False, False
        try:
            outgoing = _Outgoing(self, self._opening())
            patience_s = None if self._waits_for_a_frozen_server else settings.budget.liveness_s
            channel = open_channel(address, settings.setting, self._tls, patience_s)
            self._opening_sent = time.monotonic()
            with self._changed:
                if self._stopping:
                    return False, False
                method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(self._method)
                call = method(outgoing, metadata=self._metadata, wait_for_ready=False)
                self._call, self._outgoing = call, outgoing
            for data in call:
                self.heard_at = time.monotonic()
                push = codec.decode_push(data, they_are=self._other, we_are=self._me)
                if isinstance(push, Welcome):
                    opened_at = time.monotonic()
                self._take(outgoing, push)
            ours = outgoing.parting
        except grpc.RpcError as error:
            why, ours = explain(error), outgoing is not None and outgoing.closed
            if outgoing is not None and outgoing.left_because:
                why, ours = outgoing.left_because, False
            else:
                broke = not (why.startswith(STANDBY) or is_silent(time.monotonic(), self.heard_at, self._renew_s))
            if not self._ever_connected:
                why = self._certificates[address].advice(why) or why
            self._judge(address, error, why)
        except (ProtocolError, ConfigError) as error:
            self._refuse(error)
        except Exception:  # noqa: BLE001 - the lease outlives whatever a handler does
            why, ours = "a handler failed", True
            _log.exception("the lease of %s stumbled and is opened again", settings.replica_id)
        finally:
            with self._changed:
                self._call = self._outgoing = None
                if outgoing is not None:
                    outgoing.closed = True
                self._outbox.clear()
                was_connected, self.connected = self.connected, False
                self._changed.notify_all()
            if channel is not None:
                channel.close()
        steady = time.monotonic() - opened_at > STEADY_S
        if outgoing is None or not outgoing.parting:
            self._went_down(address, why, was_connected=was_connected, steady=steady)
        return steady, ours or (steady and broke)

    def _went_down(self, address: str, why: str, *, was_connected: bool, steady: bool) -> None:
        if self._stopping or not self._wanted or self._parting or self._fatal is not None:
            return
        if was_connected:
            self._on_down()
        due = self._absence.failed(address, why, time.monotonic(), was_open=was_connected, steady=steady)
        self.last_reason = self._absence.reason
        if due is not None:
            _log.log(due[0], "%s: %s", self.settings.replica_id, due[1])

    def _take(self, outgoing: _Outgoing, push: Push | None) -> None:
        match push:
            case None:
                pass
            case Welcome():
                self._opened(outgoing, push)
            case Refusal():
                self._refuse(push.error)
            case Acked():
                self._on_acked(push)
            case _:
                self._on_push(push)

    def _opened(self, outgoing: _Outgoing, welcome: Welcome) -> None:
        with self._changed:
            self._renew_s = self._usual_s = min(self.settings.budget.progress_s, max(0.02, welcome.liveness_s / 4))
            self._outbox.clear()
            self._outbox.extend(self._resend())
            outgoing.parting = self._parting
            outgoing.open = True
            self.connected = self._ever_connected = True
            self.last_ack = max(self.last_ack, self._opening_sent)
            self.last_reason = ""
            self._changed.notify_all()
        back = self._absence.opened(self._addresses.all[self._turn.index], time.monotonic())
        if back:
            _log.warning("%s: %s", self.settings.replica_id, back)
        self._on_open(welcome)

    def _judge(self, address: str, error: grpc.RpcError, why: str) -> None:
        """Some ends of a stream are final.

        A token that is not accepted any more is the lighthouse's mistake (it was started again with another one), and
        ends no training before autonomy does.
        """
        code, where = status_of(error), self._addresses.named(address)
        accepted = time.monotonic() - self.last_ack <= self.settings.budget.autonomy_s
        if code is grpc.StatusCode.UNAUTHENTICATED and not accepted:
            self._refuse(RefusedError(f"{where}: {why}"))
        elif code is grpc.StatusCode.UNIMPLEMENTED and not self._ever_connected:
            self._refuse(ProtocolError(f"{where} is a gRPC server, but not {self._other}: {self._advice}"))

    def _refuse(self, error: Exception) -> None:
        with self._changed:
            if self._fatal is not None or self._stopping:
                return
            self._fatal = error
            self.last_reason = str(error)
            self._close_stream()
            self._changed.notify_all()
        self._handler.on_push(Refusal(error))

    def _unreachable(self, when: str) -> str:
        because = f" ({self.last_reason})" if self.last_reason else ""
        return f"{self._addresses.named()}: {self._other} did not answer {when}{because}; {self._advice}"
