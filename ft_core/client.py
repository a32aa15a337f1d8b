"""The trainer's end of a lease (SKELETON: signatures are final, bodies follow)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ft_core.membership import Hello
from ft_core.quorum import Ask, Quorum, Version
from ft_core.rpc import Tls
from ft_core.settings import TimeBudget

Peers = tuple[tuple[str, tuple[str, ...]], ...]
"""(replica_id, heal addresses) of each current member."""


@dataclass(frozen=True)
class LeaseSettings:
    """How to reach the lighthouse, and who asks. Durations come from `budget`."""

    address: str
    """host:port or http://host:port."""
    replica_id: str
    budget: TimeBudget
    room: str = "default"
    token: str = ""
    tls: Tls | None = None
    setting: str = "lighthouse_addr (FT_LIGHTHOUSE)"
    """What to call the address in messages."""


class LeaseHandler(Protocol):
    """What the Manager is told. Called one at a time, on a control-plane thread; must not block for long or raise."""

    def hello(self) -> Hello:
        """What to present now (called at every connect). generation, incarnation (if 0) and liveness_s are filled in."""

    def on_welcome(self, peers: Peers) -> None:
        """The lease is open; `peers` are the current quorum's members, for prefetching."""

    def on_quorum(self, seq: int, quorum: Quorum) -> None:
        """The answer to the ask with this seq."""

    def on_reason(self, reason: str) -> None:
        """Why there is no quorum yet (when it changes)."""

    def on_change_pending(self, quorum_id: int, reason: str) -> None:
        """Somebody wants to join or leave: raise change-wanted in the next fence of `quorum_id`."""

    def on_member_lost(self, quorum_id: int, lost: tuple[str, ...]) -> None:
        """Members of `quorum_id` will not answer any more (or, if own replica_id is in `lost`, a rank of this group)."""

    def on_paused(self, quorum_id: int, replica_id: str, for_s: float) -> None:
        """A peer is legitimately busy for at most `for_s`; 0: it is back."""

    def on_superseded(self, quorum_id: int) -> None:
        """`quorum_id` is over: abort and ask."""

    def on_refused(self, error: Exception) -> None:
        """Final: RefusedError, JobFinishedError, ProtocolError or ConfigError. The lease will not be re-opened."""

    def on_drain(self, reason: str) -> None:
        """An operator asks this replica to finish its step and leave."""

    def on_kill(self, reason: str) -> None:
        """An operator asks this process to exit now."""


class LeaseClient:
    """Keeps one lease open, whatever happens to the network or the lighthouse."""

    last_ack: float
    """time.monotonic() at which the newest message was *sent* that the lighthouse has acknowledged; -inf before."""
    connected: bool
    last_reason: str
    """Why there is no quorum, or why the lease is not open; '' if neither."""

    def __init__(self, settings: LeaseSettings, handler: LeaseHandler) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the lease thread and begin to connect; returns at once."""

    def wait_connected(self, timeout_s: float) -> None:
        """Wait for the first Welcome. Raises LighthouseError naming setting and address, or the refusal's error."""

    def ask(self, ask: Ask, room: str | None = None) -> None:
        """Ask for the next quorum; thread-safe, returns at once; the answer comes through `on_quorum(ask.seq, ...)`."""

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """Note where training is; cheap (attribute stores). Changes of `paused_s` are sent at once."""

    def leave(self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float) -> bool:
        """Say goodbye and close the lease; True if the lighthouse acknowledged it. A later `ask` opens a new lease."""
        return False

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Close the lease without a goodbye (unless `leave` was called) and end the threads. Idempotent, bounded."""
