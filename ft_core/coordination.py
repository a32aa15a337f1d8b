"""The control plane's public names, for people who build a protocol of their own on it.

`LighthouseServer` and `LighthouseClient` are all that is needed to agree on member lists: call `quorum` whenever the
members may have changed, `heartbeat` in between. `ManagerServer` and `ManagerClient` do the same for groups of several
ranks: each rank calls `ManagerClient.quorum` and `should_commit`, the server speaks for the group.

All of them construct and start at once; `shutdown` is idempotent. Errors: see ft_core.errors.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from ft_core import wire
from ft_core.client import LeaseSettings, Peers
from ft_core.control import RankControl
from ft_core.errors import (
    ConfigError,
    FaultToleranceError,
    JobFinishedError,
    LighthouseError,
    ProtocolError,
    QuorumTimeoutError,
    RefusedError,
    UsageError,
)
from ft_core.group_server import GroupServer
from ft_core.lighthouse import LighthouseServer
from ft_core.membership import Hello
from ft_core.quorum import VOID, Ask, Version
from ft_core.quorum import Quorum as PureQuorum
from ft_core.rpc import (
    LIGHTHOUSE,
    Tls,
    explain,
    grpc,
    join_host,
    open_channel,
    reachable_host,
    split_bind,
    status_of,
    token_metadata,
)
from ft_core.settings import PROTOCOL_VERSION, TimeBudget
from ft_core.step import Outcome, Verdict
from ft_core.wire import pb

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
]

HEARTBEAT_S = timedelta(seconds=5)
TOOL_S = 5.0
"""How long a tool's call may take."""


@dataclass(frozen=True)
class QuorumMember:
    """One member of a quorum, as it asked for it."""

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str | None = None


@dataclass(frozen=True)
class Quorum:
    """An agreed member list, sorted by replica_id. `created`: the lighthouse's wall clock, in seconds since 1970."""

    quorum_id: int
    participants: list[QuorumMember]
    created: float


def _public(quorum: PureQuorum) -> Quorum:
    members = [
        QuorumMember(
            m.replica_id, m.address, m.store_address, max(m.version.step, 0), m.group_world_size, m.shrink_only,
            m.data or None,
        )
        for m in quorum.members
    ]  # fmt: skip
    return Quorum(quorum.quorum_id, members, quorum.created_ms / 1000)


_ERRORS: dict[grpc.StatusCode, type[FaultToleranceError]] = {
    grpc.StatusCode.UNAUTHENTICATED: RefusedError,
    grpc.StatusCode.FAILED_PRECONDITION: RefusedError,
    grpc.StatusCode.ABORTED: JobFinishedError,
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.DEADLINE_EXCEEDED: QuorumTimeoutError,
}


class LighthouseClient:
    """Talks to a lighthouse without a lease: one call at a time, from any thread.

    Args:
        addr: host:port or http://host:port.
        connect_timeout: how long the constructor waits for the lighthouse.
        token: the job's secret; None: FT_TOKEN.
        tls: certificates; None: FT_TLS_CERT, FT_TLS_KEY, FT_TLS_CA.
        room: the quorum namespace.

    Raises:
        ConfigError: the address has a wrong form.
        LighthouseError: nobody answers there within `connect_timeout`.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta = timedelta(seconds=60),
        *,
        token: str | None = None,
        tls: Tls | None = None,
        room: str = "default",
    ) -> None:
        self._addr = addr
        self._room = room
        self._metadata = token_metadata(os.environ.get("FT_TOKEN", "") if token is None else token)
        self._tls = tls or Tls.from_env(os.environ)
        self._channel = open_channel(addr, "addr", self._tls)
        deadline = time.monotonic() + connect_timeout.total_seconds()
        while True:
            try:
                self._status(max(0.1, deadline - time.monotonic()))
                return
            except (RefusedError, ProtocolError):
                self.close()
                raise
            except LighthouseError as error:
                if time.monotonic() >= deadline:
                    self.close()
                    limit = f"within connect_timeout={connect_timeout.total_seconds():g} s"
                    raise LighthouseError(f"addr={addr!r}: no lighthouse answered {limit}: {error}") from None
            # gRPC keeps the back-off of a failed channel: a fresh one tries at once.
            self._channel.close()
            threading.Event().wait(0.05)
            self._channel = open_channel(addr, "addr", self._tls)

    def __repr__(self) -> str:
        return f"LighthouseClient({self._addr}, room={self._room!r})"

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str = "",
        store_address: str = "",
        step: int = 0,
        world_size: int = 0,
        shrink_only: bool = False,
        data: str | None = None,
    ) -> Quorum:
        """Ask to be in the next quorum and wait for it.

        Raises:
            QuorumTimeoutError: none formed within `timeout`; the message carries the lighthouse's reason.
            RefusedError, JobFinishedError, ProtocolError, LighthouseError: the lighthouse refused or is not there.
        """
        request = pb.QuorumRequest(
            protocol_version=PROTOCOL_VERSION, room=self._room, replica_id=replica_id, address=address,
            store_address=store_address, step=step, world_size=world_size, shrink_only=shrink_only, data=data or "",
        )  # fmt: skip
        try:
            answer = self._call("Quorum", wire.encode_unary(request), timeout.total_seconds())
        except QuorumTimeoutError as error:
            limit = f"within {timeout.total_seconds():g} s"
            raise QuorumTimeoutError(f"no quorum for {replica_id} {limit}: {error}") from None
        return _public(wire.decode_quorum_info(answer))

    def heartbeat(self, replica_id: str, timeout: timedelta = HEARTBEAT_S) -> None:
        """Say that `replica_id` lives: needed between quorum calls further apart than heartbeat_timeout_ms."""
        request = pb.HeartbeatRequest(protocol_version=PROTOCOL_VERSION, room=self._room, replica_id=replica_id)
        self._call("Heartbeat", wire.encode_unary(request), timeout.total_seconds())

    def status(self, timeout: timedelta = HEARTBEAT_S) -> pb.StatusResponse:
        """What the lighthouse knows: rooms, their quorums, replicas, and why there is no quorum."""
        return self._status(timeout.total_seconds())

    def report_ended(self, replica_id: str, timeout: timedelta = HEARTBEAT_S) -> bool:
        """A supervisor's word that a process (replica_id), or all of a name, ended. True if the lighthouse knew it."""
        request = pb.ReportRequest(protocol_version=PROTOCOL_VERSION, room=self._room, ended=replica_id)
        answer = self._call("Report", wire.encode_unary(request), timeout.total_seconds())
        return pb.ReportResponse.FromString(answer).rooms > 0

    def drain(self, replica: str, reason: str = "") -> list[str]:
        """Ask a replica_id, or all of a name, to finish their step and leave. Needs a token. Returns who was told."""
        return self._order("Drain", replica, reason)

    def kill(self, replica: str, reason: str = "") -> list[str]:
        """Ask a replica_id, or all of a name, to exit now. Needs a token. Returns who was told."""
        return self._order("Kill", replica, reason)

    def reopen(self) -> bool:
        """Open the room again if a finished replica closed it. True if it was closed."""
        request = pb.ReopenRequest(protocol_version=PROTOCOL_VERSION, room=self._room)
        answer = self._call("Reopen", wire.encode_unary(request), TOOL_S)
        return pb.ReopenResponse.FromString(answer).was_closed

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()

    def _order(self, method: str, replica: str, reason: str) -> list[str]:
        request = pb.OrderRequest(
            protocol_version=PROTOCOL_VERSION, room=self._room, replica=replica, reason=wire.clip(reason)
        )
        return list(pb.OrderResponse.FromString(self._call(method, wire.encode_unary(request), TOOL_S)).told)

    def _status(self, timeout_s: float) -> pb.StatusResponse:
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
        return pb.StatusResponse.FromString(self._call("Status", wire.encode_unary(request), timeout_s))

    def _call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"/{LIGHTHOUSE}/{method}")
        try:
            return call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = status_of(error)
            kind = _ERRORS.get(code, LighthouseError) if code is not None else LighthouseError
            raise kind(explain(error)) from None
        except ValueError:
            raise UsageError("this LighthouseClient has been closed") from None


class _Silent:
    """A LeaseHandler for which only the hello and the errors matter."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._changed = threading.Condition()
        self._quorums: dict[int, PureQuorum] = {}
        self._latest: PureQuorum | None = None
        self._error: Exception | None = None

    def hello(self) -> Hello:
        """The quorum we are in goes with it, so that a restarted lighthouse can adopt it."""
        if self._latest is None:
            return self._hello
        quorum_id = self._latest.quorum_id
        return Hello(
            self._hello.replica_id, self._hello.name, 0, 0, highest_id=quorum_id, quorum_id=quorum_id,
            members=self._latest.ids, group_world_size=self._hello.group_world_size,
        )  # fmt: skip

    def on_quorum(self, seq: int, quorum: PureQuorum) -> None:
        """An answer."""
        with self._changed:
            self._quorums = {seq: quorum}
            self._latest = quorum
            self._changed.notify_all()

    def on_refused(self, error: Exception) -> None:
        """It is over."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, seq: int, timeout_s: float) -> PureQuorum | None:
        """The answer to an ask; None if it does not come in time. Raises what `on_refused` was told."""
        with self._changed:
            self._changed.wait_for(lambda: seq in self._quorums or self._error is not None, timeout_s)
            if seq not in self._quorums and self._error is not None:
                raise self._error
            return self._quorums.get(seq)

    def on_welcome(self, peers: Peers) -> None:
        """Nothing to do."""

    def on_reason(self, reason: str) -> None:
        """Nothing to do: `last_reason` has it."""

    def on_change_pending(self, quorum_id: int, reason: str) -> None:
        """Nothing to do: ranks ask at every step."""

    def on_member_lost(self, quorum_id: int, lost: tuple[str, ...]) -> None:
        """Nothing to do: the data plane is the caller's."""

    def on_paused(self, quorum_id: int, replica_id: str, for_s: float) -> None:
        """Nothing to do."""

    def on_superseded(self, quorum_id: int) -> None:
        """Nothing to do: ranks ask at every step."""

    def on_drain(self, reason: str) -> None:
        """Nothing to do."""

    def on_kill(self, reason: str) -> None:
        """Nothing to do."""


class ManagerServer:
    """Speaks for one group: all its ranks connect to it with `ManagerClient`. The constructor starts it.

    Args:
        replica_id: of the group; unique among the groups.
        lighthouse_addr: host:port or http://host:port.
        hostname: what the group's ranks can reach this machine by; '': its name.
        bind: host:port to listen on; port 0 takes any free one.
        store_addr: the group's c10d store, handed to the other groups.
        world_size: number of ranks.
        heartbeat_interval: how often the lease is renewed.
        connect_timeout: how long the lighthouse and the ranks may take to appear.
        quorum_retries: accepted for compatibility; asks are presented again until answered.
        token: the job's secret; None: FT_TOKEN.

    Raises:
        ConfigError: an address has a wrong form or the port is taken.
        LighthouseError: the lighthouse did not answer within `connect_timeout`, or refused.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str = "",
        bind: str = "[::]:0",
        store_addr: str = "",
        world_size: int = 1,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        connect_timeout: timedelta = timedelta(seconds=60),
        quorum_retries: int = 0,  # noqa: ARG002
        *,
        token: str | None = None,
    ) -> None:
        host, port = split_bind(bind, "bind")
        budget = _budget(connect_timeout, heartbeat_interval.total_seconds())
        settings = LeaseSettings(
            address=lighthouse_addr, replica_id=replica_id, budget=budget, setting="lighthouse_addr",
            token=os.environ.get("FT_TOKEN", "") if token is None else token,
        )  # fmt: skip
        handler = _Silent(Hello(replica_id, replica_id, 0, 0, group_world_size=world_size))
        self.store_addr = store_addr
        self._host = hostname or reachable_host(host)
        self._group = GroupServer(settings, handler, world_size=world_size, host=host, port=port, local_rank=None)
        self._group.start()
        try:
            self._group.lease.wait_connected(connect_timeout.total_seconds())
        except BaseException:
            self.shutdown()
            raise

    def __repr__(self) -> str:
        return f"ManagerServer({self.address()}, {self._group!r})"

    def address(self) -> str:
        """http://host:port for `ManagerClient`."""
        return f"http://{join_host(self._host, self._group.port)}"

    def shutdown(self) -> None:
        """End the group's lease and stop listening. Idempotent."""
        self._group.shutdown(5.0)


class ManagerClient:
    """One rank's link to its `ManagerServer`.

    Args:
        addr: `ManagerServer.address()`.
        connect_timeout: how long the constructor waits for it.
        replica_id, group_rank, world_size: of this rank; as given to the server.
        store_address, heal_address: handed to the other groups (that of rank 0, one per rank).
        token: the job's secret; None: FT_TOKEN.

    Raises:
        LighthouseError: the server did not answer, or refused this rank.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta = timedelta(seconds=60),
        *,
        replica_id: str = "",
        group_rank: int = 0,
        world_size: int = 1,
        store_address: str = "",
        heal_address: str = "",
        token: str | None = None,
    ) -> None:
        if not replica_id:
            raise ConfigError("replica_id='' of ManagerClient: pass that of its ManagerServer")
        self._template = Ask(
            replica_id, 0, group_world_size=world_size, store_address=store_address,
            heal_addresses=(heal_address,) if heal_address else (),
        )  # fmt: skip
        settings = LeaseSettings(
            address=addr, replica_id=replica_id, budget=_budget(connect_timeout, 0.0), setting="addr",
            token=os.environ.get("FT_TOKEN", "") if token is None else token,
        )  # fmt: skip
        self._handler = _Silent(Hello(replica_id, replica_id, 0, 0))
        self._control = RankControl(settings, self._handler, rank=group_rank, world_size=world_size)
        self._rank = group_rank
        self._seq = 0
        self._quorum_id = 0
        self._votes: dict[int, int] = {}
        self._control.start()
        try:
            self._control.wait_connected(connect_timeout.total_seconds())
        except BaseException:
            self._control.shutdown()
            raise

    def __repr__(self) -> str:
        return f"ManagerClient(rank={self._rank}, {self._control!r})"

    def quorum(
        self, step: int, timeout: timedelta, *, shrink_only: bool = False, failed: bool = False, data: str = ""
    ) -> Quorum:
        """Ask for the next quorum together with the other ranks of the group, and wait for it.

        Args:
            step: this rank's step; ranks that differ are treated as holding no usable state.
            timeout: how long to wait.
            shrink_only: only members of the current quorum may be in the next one.
            failed: the collectives of the current quorum broke under this rank.
            data: free text handed to the other groups (that of rank 0).

        Raises:
            QuorumTimeoutError: none formed in time; the message carries the reason.
            LighthouseError, ConfigError: refused for good.
        """
        self._seq += 1
        ask = Ask(
            self._template.replica_id, self._seq, Version(step, 0), quorum_id=self._quorum_id, failed=failed,
            group_world_size=self._template.group_world_size, store_address=self._template.store_address,
            heal_addresses=self._template.heal_addresses, shrink_only=shrink_only, data=data,
        )  # fmt: skip
        self._control.ask(ask)
        quorum = self._handler.wait(self._seq, timeout.total_seconds())
        if quorum is None:
            why = self._control.last_reason or "no reason given"
            raise QuorumTimeoutError(f"no quorum within {timeout.total_seconds():g} s: {why}")
        self._quorum_id = quorum.quorum_id
        self._votes = {}
        return _public(quorum)

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """The group's vote on a step: True on every rank if every rank said True, else False on every rank.

        A step may be voted on again: the n-th vote of each rank on it belongs to the n-th of the others.
        """
        if group_rank != self._rank:
            raise ConfigError(f"group_rank={group_rank} votes through the ManagerClient of rank {self._rank}")
        count = self._votes[step] = self._votes.get(step, -1) + 1
        self._votes = {known: n for known, n in self._votes.items() if known >= step - 8}
        attempt = (step << 16) | count
        outcome = Outcome.COMMIT if should_commit else Outcome.VETO
        vote = Verdict(self._quorum_id, attempt, outcome, "" if should_commit else "a rank said no")
        verdict = self._control.vote(vote, timeout.total_seconds())
        if verdict.outcome is Outcome.BROKEN and not should_commit:
            return False
        if verdict.outcome is Outcome.BROKEN:
            raise LighthouseError(f"the group could not agree on step {step}: {verdict.reason}")
        return verdict.outcome is Outcome.COMMIT

    def shutdown(self) -> None:
        """Leave the group. Idempotent."""
        self._control.leave("shut down", finished=False, version=VOID, agreed=False, timeout_s=1.0)
        self._control.shutdown()


def _budget(connect_timeout: timedelta, progress_s: float) -> TimeBudget:
    overrides = {"liveness_s": 5.0}
    if progress_s > 0:
        overrides["progress_s"] = min(progress_s, 2.5)
    return TimeBudget.derive(60.0, connect_s=connect_timeout.total_seconds(), overrides=overrides)
