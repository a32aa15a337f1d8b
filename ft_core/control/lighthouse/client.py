"""A client of the lighthouse that needs no lease: unary calls, for protocols of one's own, supervisors and tools.

Thread safe; every call is bounded by its timeout. Errors: see ft_core.errors; what the lighthouse refuses arrives as
the error that names it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.access import admin_token as of_admin
from ft_core.access import job_token
from ft_core.addresses import Addresses
from ft_core.control.lighthouse.lighthouse_channel import LighthouseChannel, StatusStream
from ft_core.errors import (
    ConfigError,
    FaultToleranceError,
    LighthouseError,
    ProtocolError,
    QuorumTimeoutError,
    RefusedError,
)
from ft_core.rpc import codec
from ft_core.rpc.channel import QUORUM_ANSWER_S, Tls, token_metadata
from ft_core.rpc.codec import pb
from ft_core.settings import DEFAULT_ROOM, PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ft_core.protocol.types import Quorum as PureQuorum

_log = logging.getLogger("ft_core")
HEARTBEAT_S = timedelta(seconds=5)
ROOMS_S = timedelta(seconds=5)
"""How long `rooms` waits to reach the lighthouse, and again for its answer."""
ROUND_S = 0.05
"""Pause of the constructor after each round of attempts in which no lighthouse answered."""
CERTAIN_S = 1.0
"""A connection that has failed for so long because of certificates is given up: waiting does not make them fit."""
TOOL_S = 5.0
"""How long a tool's call may take."""
_JSON, _TEXT = "json:", "text:"
"""The prefixes of `data` that is a dict, and of text that itself begins like one of these."""


@dataclass(frozen=True)
class QuorumMember:
    """One member of a quorum, as it asked for it.

    Args:
        replica_id: who it is.
        address: of its group's server, host:port.
        store_address: of its group's c10d store, host:port.
        step: the newest step that it holds; 0: none.
        world_size: number of ranks in the group.
        shrink_only: it asked for a quorum without newcomers.
        data: what it sent along, text or a dict.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str | dict[str, Any] | None = None


@dataclass(frozen=True)
class Quorum:
    """An agreed member list.

    Args:
        quorum_id: grows with every change of the members, also across restarts of the lighthouse.
        participants: the members, sorted by replica_id.
        created: when, by the lighthouse's wall clock, in seconds since 1970.
    """

    quorum_id: int
    participants: list[QuorumMember]
    created: float


def data_as_text(data: str | Mapping[str, Any] | None) -> str:
    """How `data` travels. Raises ConfigError for a dict that would not arrive as it was given."""
    if data is None:
        return ""
    if isinstance(data, str):
        return _TEXT + data if data.startswith((_JSON, _TEXT)) else data
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data={data!r} cannot be sent: {error}; pass text, or a dict that JSON can hold") from None
    if json.loads(text) != data:
        raise ConfigError(
            f"data={data!r} would arrive as {json.loads(text)!r}: JSON has text as keys, and lists for tuples"
        )
    return _JSON + text


def data_of_text(text: str) -> str | dict[str, Any] | None:
    """The inverse of `data_as_text`. Raises ProtocolError for anything else."""
    if text.startswith(_TEXT):
        return text.removeprefix(_TEXT)
    if not text.startswith(_JSON):
        return text or None
    try:
        data = json.loads(text.removeprefix(_JSON))
    except ValueError as error:
        raise ProtocolError(f"a member's data is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProtocolError(f"a member's data is a {type(data).__name__}, not a dict")
    return data


def public_quorum(quorum: PureQuorum) -> Quorum:
    """The quorum in the form that users of the unary calls know."""
    members = [
        QuorumMember(
            m.replica_id, m.address, m.store_address, max(m.version.step, 0), m.group_world_size, m.shrink_only,
            data_of_text(m.data),
        )
        for m in quorum.members
    ]  # fmt: skip
    return Quorum(quorum.quorum_id, members, quorum.created_ms / 1000)


class LighthouseClient:
    """A connection to a lighthouse without a lease: one call at a time, from any thread.

    Args:
        addr: host:port or http://host:port; of two lighthouses, one of which stands by, both, with a comma between
            them. Each call goes to the one that is active.
        connect_timeout: how long the constructor waits for the lighthouse.
        token: the job's secret; None: FT_TOKEN.
        admin_token: what `drain` and `kill` are sent with; None: FT_ADMIN_TOKEN, and where that is not set, `token`.
        tls: certificates; None: FT_TLS_CERT, FT_TLS_KEY, FT_TLS_CA.
        room: the quorum namespace.

    Raises:
        ConfigError: the address has a wrong form.
        LighthouseError: nobody answers there within `connect_timeout`, or certificates do not fit.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta = timedelta(seconds=60),
        *,
        token: str | None = None,
        admin_token: str | None = None,
        tls: Tls | None = None,
        room: str = DEFAULT_ROOM,
    ) -> None:
        self._addr = addr
        self.room = room
        """Quorum namespace of the calls that follow."""
        token = job_token(os.environ) if token is None else token
        admin = of_admin({**os.environ, "FT_TOKEN": token}) if admin_token is None else admin_token or token
        # Who holds only the admin token may do everything else as well.
        self._metadata, self._order_metadata = token_metadata(token or admin), token_metadata(admin)
        self._tls = tls or Tls.from_env(os.environ)
        self._channel = LighthouseChannel(Addresses.parse(addr, "addr"), self._tls)
        deadline = certain = time.monotonic() + connect_timeout.total_seconds()
        while True:
            try:
                self._status(max(0.1, deadline - time.monotonic()))
                return
            except (RefusedError, ProtocolError):
                self.close()
                raise
            except LighthouseError as error:
                advice = self._channel.advice()
                certain = min(certain, time.monotonic() + CERTAIN_S) if advice else deadline
                if time.monotonic() >= certain:
                    self.close()
                    limit = f"within connect_timeout={connect_timeout.total_seconds():g} s"
                    if advice:
                        raise LighthouseError(f"addr={addr!r}: {advice}") from None
                    why = self._channel.reasons or error
                    raise LighthouseError(f"addr={addr!r}: no lighthouse answered {limit}: {why}") from None
            threading.Event().wait(ROUND_S)
            self._channel.renew()

    def __repr__(self) -> str:
        return f"LighthouseClient({self._addr}, room={self.room!r})"

    @property
    def active(self) -> str:
        """The address at which the last call was answered, or at which the next one is tried."""
        return self._channel.address

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str = "",
        store_address: str = "",
        step: int = 0,
        world_size: int = 0,
        shrink_only: bool = False,
        data: str | Mapping[str, Any] | None = None,
    ) -> Quorum:
        """Ask to be in the next quorum and wait for it. `data`: text, or a dict that JSON can hold, for the others.

        Raises:
            ConfigError: `data` is a dict that JSON cannot hold.
            QuorumTimeoutError: none formed within `timeout`; the message carries the lighthouse's reason.
            RefusedError, JobFinishedError, ProtocolError, LighthouseError: the lighthouse refused or is not there.
        """
        request = pb.QuorumRequest(
            protocol_version=PROTOCOL_VERSION, room=self.room, replica_id=replica_id, address=address,
            store_address=store_address, step=step, world_size=world_size, shrink_only=shrink_only,
            data=data_as_text(data),
        )  # fmt: skip
        try:
            answer = self._call("Quorum", codec.encode_unary(request), timeout.total_seconds() + QUORUM_ANSWER_S)
        except QuorumTimeoutError as error:
            limit = f"within {timeout.total_seconds():g} s"
            raise QuorumTimeoutError(f"no quorum for {replica_id} {limit}: {error}") from None
        return public_quorum(codec.decode_quorum_info(answer))

    def heartbeat(self, replica_id: str, timeout: timedelta = HEARTBEAT_S) -> None:
        """Report that `replica_id` lives: needed between quorum calls further apart than heartbeat_timeout_ms."""
        request = pb.HeartbeatRequest(protocol_version=PROTOCOL_VERSION, room=self.room, replica_id=replica_id)
        self._call("Heartbeat", codec.encode_unary(request), timeout.total_seconds())

    def status(
        self, timeout: timedelta = HEARTBEAT_S, names: Collection[str] = (), room: str = ""
    ) -> pb.StatusResponse:
        """The lighthouse's knowledge: rooms, their quorums, replicas, and why there is no quorum.

        With `names`, only the replicas of these names, and no lists of members; with `room`, only that one.
        """
        return self._status(timeout.total_seconds(), names, room)

    def watch(self, names: Collection[str] = (), room: str = "") -> StatusStream:
        """The same when it has changed, and a few times per second at most, until it is cancelled."""
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION, names=names, room=room)
        return self._channel.watch(codec.encode_unary(request), self._metadata)

    def report_ended(self, replica_id: str, timeout: timedelta = HEARTBEAT_S) -> bool:
        """Report that a process (replica_id), or all of a name, ended. True if the lighthouse knew one."""
        request = pb.ReportRequest(protocol_version=PROTOCOL_VERSION, room=self.room, ended=replica_id)
        answer = self._call("Report", codec.encode_unary(request), timeout.total_seconds())
        return pb.ReportResponse.FromString(answer).rooms > 0

    def report_given_up(self, name: str, reason: str, timeout: timedelta = HEARTBEAT_S) -> None:
        """Report that all processes of a name ended and none is started again: nobody waits for it any more."""
        request = pb.ReportRequest(
            protocol_version=PROTOCOL_VERSION, room=self.room, ended=name, given_up=True, reason=codec.clip(reason)
        )
        self._call("Report", codec.encode_unary(request), timeout.total_seconds())

    def drain(self, replica: str, reason: str = "") -> list[str]:
        """Ask a replica_id, or all of a name, to finish the step and leave. Returns who was sent it.

        Needs the admin token.
        """
        return self._order("Drain", replica, reason)

    def kill(self, replica: str, reason: str = "") -> list[str]:
        """Ask a replica_id, or all of a name, to exit now; needs the admin token. Returns who was sent it."""
        return self._order("Kill", replica, reason)

    def reopen(self) -> bool:
        """Open the room again if a finished replica closed it. True if it was closed."""
        request = pb.ReopenRequest(protocol_version=PROTOCOL_VERSION, room=self.room)
        answer = self._call("Reopen", codec.encode_unary(request), TOOL_S)
        return pb.ReopenResponse.FromString(answer).was_closed

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()

    def _order(self, method: str, replica: str, reason: str) -> list[str]:
        request = pb.OrderRequest(
            protocol_version=PROTOCOL_VERSION, room=self.room, replica=replica, reason=codec.clip(reason)
        )
        answer = self._call(method, codec.encode_unary(request), TOOL_S, self._order_metadata)
        return list(pb.OrderResponse.FromString(answer).told)

    def _status(self, timeout_s: float, names: Collection[str] = (), room: str = "") -> pb.StatusResponse:
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION, names=names, room=room)
        return pb.StatusResponse.FromString(self._call("Status", codec.encode_unary(request), timeout_s))

    def _call(
        self, method: str, request: bytes, timeout_s: float, metadata: tuple[tuple[str, str], ...] | None = None
    ) -> bytes:
        return self._channel.call(method, request, timeout_s, self._metadata if metadata is None else metadata)


def rooms(address: str) -> list[pb.RoomStatus] | None:
    """All rooms of the lighthouse at `address` (or at either of two); None if it cannot be asked within ROOMS_S."""
    try:
        client = LighthouseClient(address, ROOMS_S)
        try:
            return list(client.status(ROOMS_S).rooms)
        finally:
            client.close()
    except FaultToleranceError as error:
        _log.info("the lighthouse could not be asked who trains: %s", error)
        return None
