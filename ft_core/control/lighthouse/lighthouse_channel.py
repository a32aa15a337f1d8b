"""A gRPC channel to the lighthouse, at whichever of its addresses is active; for calls without a lease.

How it works. There is one channel at a time. A call that ends as UNAVAILABLE (no connection, a broken one, "standby: ")
is made again at the next address, on a fresh channel, until each address has had it once; then it fails with what was
found at each. After one that was not answered in time the next call is made there, too: the lighthouse may be frozen,
and if it is only slow, the other one says that it stands by. All calls of the lighthouse's may be made twice: they say
what is true, or what is wished for. With one address a call is made once, and the channel is kept.

Invariants: a call is made at most MAX_TRIES times, all of them within its timeout. Threads: any, several at once. One
that finds that another has gone on to the next address follows it; the channel that is replaced takes the calls with it
that wait there, and they are made again.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from ft_core.addresses import Addresses, Turn
from ft_core.errors import (
    FaultToleranceError,
    JobFinishedError,
    LighthouseError,
    ProtocolError,
    QuorumTimeoutError,
    RefusedError,
    UsageError,
)
from ft_core.rpc.channel import LIGHTHOUSE, explain, grpc, open_channel, status_of
from ft_core.rpc.codec import pb
from ft_core.settings import PROTOCOL_VERSION, parse_address
from ft_core.tls_diagnosis import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_core.rpc.channel import Tls

Metadata = tuple[tuple[str, str], ...]
MAX_TRIES = 8
"""How often a call is made at most, while others replace the channel under it."""
STEADY_S = 1.0
"""After a stream that lived this long, all addresses are tried again."""
CLOSED = "this LighthouseClient has been closed"

_ERRORS: dict[grpc.StatusCode, type[FaultToleranceError]] = {
    grpc.StatusCode.UNAUTHENTICATED: RefusedError,
    grpc.StatusCode.PERMISSION_DENIED: RefusedError,
    grpc.StatusCode.FAILED_PRECONDITION: RefusedError,
    grpc.StatusCode.ABORTED: JobFinishedError,
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.DEADLINE_EXCEEDED: QuorumTimeoutError,
}


class _Tries:
    """How one call has fared so far."""

    def __init__(self) -> None:
        self.made = 0
        self.reasons: dict[str, str] = {}
        """Why it came to nothing, by address."""


class LighthouseChannel:
    """The channel of one client.

    Args:
        addresses: of the lighthouse.
        tls: certificates; None: without.
    """

    def __init__(self, addresses: Addresses, tls: Tls | None) -> None:
        self._addresses, self._tls = addresses, tls
        self._lock = threading.Lock()
        self._turn = Turn(len(addresses))
        self._closed = False
        self._reasons: dict[str, str] = {}
        """Why the last call of all that found nobody at an address did."""
        self._diagnoses = {
            one: Diagnosis(tls, *parse_address(one, addresses.setting)) for one in addresses.all
        }  # fmt: skip
        self._channel = self._open(self._turn)

    def __repr__(self) -> str:
        return f"LighthouseChannel({self._addresses}, at {self.address})"

    @property
    def address(self) -> str:
        """Where it leads now."""
        return self._addresses.all[self._turn.index]

    def call(self, method: str, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """The answer. Raises what the lighthouse's refusal or absence is; UsageError after `close`."""
        deadline, tries = time.monotonic() + timeout_s, _Tries()
        while True:
            channel, address = self._now()
            try:
                unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{LIGHTHOUSE}/{method}")
                return unary(request, timeout=timeout_s, metadata=metadata)
            except (grpc.RpcError, ValueError) as error:
                timeout_s = deadline - time.monotonic()
                again = self.goes_on(channel, address, error, tries, waits=method == "Quorum")
                if not again or timeout_s <= 0:
                    raise self.error_of(error, tries) from None

    def watch(self, request: bytes, metadata: Metadata) -> StatusStream:
        """What the lighthouse answers to Watch, one after the other."""
        return StatusStream(self, request, metadata)

    def begin(self, method: str, request: bytes, metadata: Metadata) -> tuple[grpc.Channel, str, Any]:
        """A call with many answers, with the channel and the address at which it is made."""
        for _ in range(MAX_TRIES):
            channel, address = self._now()
            stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{LIGHTHOUSE}/{method}")
            try:
                return channel, address, stream(request, metadata=metadata)
            except ValueError:
                if self._closed:
                    break  # else another thread has just replaced it
        raise UsageError(CLOSED)

    def goes_on(
        self, channel: grpc.Channel, address: str, error: Exception, tries: _Tries, *, waits: bool = False
    ) -> bool:
        """A call ended with an error there: whether it is to be made again, wherever the channel leads now.

        `waits`: the lighthouse answers it when there is something to answer, so that it was not says nothing.
        """
        tries.made += 1
        code = status_of(error) if isinstance(error, grpc.RpcError) else grpc.StatusCode.CANCELLED
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED and not waits
        with self._lock:
            if self._closed or tries.made >= MAX_TRIES:
                return False
            if channel is not self._channel:
                return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            if not isinstance(error, grpc.RpcError) or not (late or code is grpc.StatusCode.UNAVAILABLE):
                return False
            tries.reasons[address] = explain(error)
            if not late:
                self._reasons[address] = tries.reasons[address]
        if len(self._addresses) == 1:
            return False
        self._replace(channel, self._turn.ended(steady=True, first_s=0.0, most_s=0.0))
        return not late and len(tries.reasons) < len(self._addresses)

    def _replace(self, old: grpc.Channel, turn: Turn) -> None:
        """Go on with a fresh channel, unless another thread has done so."""
        fresh = self._open(turn)
        with self._lock:
            if self._channel is old and not self._closed:
                self._turn, self._channel, fresh = turn, fresh, old
        fresh.close()

    def error_of(self, error: Exception, tries: _Tries) -> FaultToleranceError:
        """What the end of a call means."""
        if not isinstance(error, grpc.RpcError):
            return UsageError(CLOSED)
        code = status_of(error)
        kind = _ERRORS.get(code, LighthouseError) if code is not None else LighthouseError
        several = kind is LighthouseError and len(self._addresses) > 1 and bool(tries.reasons)
        return kind(self._addresses.each(tries.reasons) if several else explain(error))

    @property
    def reasons(self) -> str:
        """Why nobody was found at each of two addresses; '': somebody was at all, or there is one address."""
        return self._addresses.each(self._reasons) if len(self._addresses) > 1 else ""

    def advice(self) -> str:
        """What to do where certificates are why no address answers; '' if they are not. May connect to find out."""
        known = {one: self._diagnoses[one].advice(why) for one, why in self._reasons.items()}
        return self._addresses.each(known) if len(known) == len(self._addresses) and all(known.values()) else ""

    def renew(self) -> None:
        """Try afresh: gRPC keeps the back-off of a channel that failed."""
        self._replace(self._channel, self._turn)

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._lock:
            self._closed = True
            channel = self._channel
        channel.close()

    def _open(self, turn: Turn) -> grpc.Channel:
        return open_channel(self._addresses.all[turn.index], self._addresses.setting, self._tls)

    def _now(self) -> tuple[grpc.Channel, str]:
        with self._lock:
            return self._channel, self.address


def is_active(address: str, setting: str, tls: Tls | None, metadata: Metadata, timeout_s: float) -> bool:
    """Whether a lighthouse is there that answers, and does not stand by for another one."""
    request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION, names=["-"])  # of nobody: the answer is short
    try:
        channel = LighthouseChannel(Addresses((address,), setting), tls)
        try:
            channel.call("Status", request.SerializeToString(), timeout_s, metadata)
        finally:
            channel.close()
    except FaultToleranceError:
        return False
    return True


class StatusStream:
    """The answers of one `LighthouseClient.watch`. Iterate over it on one thread; `cancel` it on any."""

    def __init__(self, channel: LighthouseChannel, request: bytes, metadata: Metadata) -> None:
        self._way, self._request, self._metadata = channel, request, metadata
        self._lock = threading.Lock()
        self._cancelled = False
        self._at: tuple[grpc.Channel, str, Any] = channel.begin("Watch", request, metadata)

    def __iter__(self) -> Iterator[pb.StatusResponse]:
        """What arrives; ends after `cancel`. Raises what the lighthouse's refusal or absence is."""
        tries = _Tries()
        while True:
            channel, address, call = self._at
            began = time.monotonic()
            try:
                for data in call:
                    yield pb.StatusResponse.FromString(data)
                return
            except grpc.RpcError as error:
                if self._cancelled:
                    return
                if time.monotonic() - began >= STEADY_S:
                    tries = _Tries()
                if not self._way.goes_on(channel, address, error, tries):
                    raise self._way.error_of(error, tries) from None
            with self._lock:
                if self._cancelled:
                    return
                self._at = self._way.begin("Watch", self._request, self._metadata)

    def cancel(self) -> None:
        """End it. Again: no effect."""
        with self._lock:
            self._cancelled = True
            call = self._at[2]
        call.cancel()
