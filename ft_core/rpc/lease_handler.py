"""What the owner of a lease is told, and which push calls what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ft_core.protocol.types import VOID
from ft_core.rpc import codec

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.types import Quorum, Version

Peers = tuple[tuple[str, tuple[str, ...]], ...]
"""(replica_id, heal addresses) of each current member."""


class LeaseHandler(Protocol):
    """What the Manager is told. Called one at a time, on a control-plane thread; must not block for long or raise."""

    def hello(self) -> Hello:
        """What to present now (called at every connect). generation, incarnation (if 0) and liveness_s are filled
        in."""

    def on_welcome(self, peers: Peers) -> None:
        """The lease is open; `peers` are the current quorum's members, for prefetching."""

    def on_quorum(self, seq: int, quorum: Quorum) -> None:
        """The answer to the ask with this seq."""

    def on_reason(self, reason: str, paused_s: float = 0.0) -> None:
        """Why there is no quorum yet (when it changes); what it waits for is busy for at most `paused_s` more."""

    def on_change_pending(self, quorum_id: int, reason: str) -> None:
        """Somebody wants to join or leave: raise change-wanted in the next fence of `quorum_id`."""

    def on_member_lost(self, quorum_id: int, lost: tuple[str, ...], held: Version = VOID) -> None:
        """Members of `quorum_id` will not answer any more (own replica_id: a rank of this group); see `Step.lost`."""

    def on_paused(self, quorum_id: int, replica_id: str, for_s: float) -> None:
        """A peer (own replica_id: a rank of this group) is legitimately busy for at most `for_s`; 0: it is back."""

    def on_superseded(self, quorum_id: int) -> None:
        """`quorum_id` is over: abort and ask."""

    def on_refused(self, error: Exception) -> None:
        """Final: RefusedError, JobFinishedError, ProtocolError or ConfigError. The lease will not be re-opened."""

    def on_drain(self, reason: str) -> None:
        """An operator asks this replica to finish its step and leave."""

    def on_kill(self, reason: str) -> None:
        """An operator asks this process to exit now."""


def deliver(handler: LeaseHandler, push: codec.Push) -> None:
    """Call the handler's method for a push."""
    match push:
        case codec.Answer():
            handler.on_quorum(push.seq, push.quorum)
        case codec.Reason():
            handler.on_reason(push.text, push.paused_s)
        case codec.Change():
            handler.on_change_pending(push.quorum_id, push.reason)
        case codec.Lost():
            handler.on_member_lost(push.quorum_id, push.lost, push.held)
        case codec.Busy():
            handler.on_paused(push.quorum_id, push.replica_id, push.for_s)
        case codec.Over():
            handler.on_superseded(push.quorum_id)
        case codec.Order():
            (handler.on_kill if push.kill else handler.on_drain)(push.reason)
        case _:
            pass
