"""The lease's handler on group rank 0: hands everything to the group server's loop, which tells all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.types import VOID, Quorum, Version
from ft_core.rpc import codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.rpc.lease_handler import LeaseHandler, Peers


class Relay:
    """A LeaseHandler that answers `hello` itself and posts the rest.

    Args:
        post: runs work on the loop.
        handler: of rank 0.
        welcome: what the loop does when the lighthouse has welcomed the group.
        push: what the loop does with a push.
        refused: what the loop does with a final refusal.
    """

    def __init__(
        self, post: Callable[[Callable[[], object]], object], handler: LeaseHandler, welcome: Callable[[], object],
        push: Callable[[codec.Push], object], refused: Callable[[Exception], object],
    ) -> None:  # fmt: skip
        self._post, self._handler, self._on_welcome = post, handler, welcome
        self._on_push, self._on_refused = push, refused

    def _push(self, push: codec.Push) -> None:
        self._post(lambda: self._on_push(push))

    def hello(self) -> Hello:
        """See LeaseHandler."""
        return self._handler.hello()

    def on_welcome(self, peers: Peers) -> None:
        """See LeaseHandler."""
        self._post(self._on_welcome)
        self._post(lambda: self._handler.on_welcome(peers))

    def on_quorum(self, seq: int, quorum: Quorum) -> None:
        """See LeaseHandler."""
        self._push(codec.Answer(seq, quorum))

    def on_reason(self, reason: str, paused_s: float = 0.0) -> None:
        """See LeaseHandler."""
        self._push(codec.Reason(reason, paused_s))

    def on_change_pending(self, quorum_id: int, reason: str) -> None:
        """See LeaseHandler."""
        self._push(codec.Change(quorum_id, reason))

    def on_member_lost(self, quorum_id: int, lost: tuple[str, ...], held: Version = VOID) -> None:
        """See LeaseHandler."""
        self._push(codec.Lost(quorum_id, lost, held))

    def on_paused(self, quorum_id: int, replica_id: str, for_s: float) -> None:
        """See LeaseHandler."""
        self._push(codec.Busy(quorum_id, replica_id, for_s))

    def on_superseded(self, quorum_id: int) -> None:
        """See LeaseHandler."""
        self._push(codec.Over(quorum_id))

    def on_refused(self, error: Exception) -> None:
        """See LeaseHandler."""
        self._post(lambda: self._on_refused(error))

    def on_drain(self, reason: str) -> None:
        """See LeaseHandler."""
        self._push(codec.Order(kill=False, reason=reason))

    def on_kill(self, reason: str) -> None:
        """See LeaseHandler."""
        self._push(codec.Order(kill=True, reason=reason))
