"""How a step's state moves to healing peers: `CheckpointTransport` for users, `LiveTransport` for the Manager.

`CheckpointTransport` is the reference implementation's interface, for transports of one's own. Life of a step: on the
donor `send_checkpoint` (at the step boundary), then `disallow_checkpoint` before the optimizer changes anything; on the
healing side `recv_checkpoint` with the donor's `metadata()`. All on the training thread or the Manager's executor,
never two calls of one transport at once.

`LiveTransport` is what ours are, and all that the Manager asks of them: it knows who gives and who receives in a quorum
(`Exchange`), receives from several donors at once into the receiver's own tensors, and what was received counts only if
every donor confirmed that its offer was open until it had been read. Whatever carries the state of a quorum, each
replica has a heal server (`server`): it is what peers reach it at, hands out live state before a newcomer joins, and
answers questions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta
    from threading import Event

    from ft_core.checkpointing.http.server import StateServer
    from ft_core.checkpointing.own_state import OwnState
    from ft_core.checkpointing.range_fetch import FetchResult
    from ft_core.checkpointing.receive_plan import Gauge, Prefetched

T = TypeVar("T")


class CheckpointTransport(Generic[T], ABC):
    """Moves live state between replicas."""

    @abstractmethod
    def metadata(self) -> str:
        """What a peer needs to receive from this transport; travels through the lighthouse."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Make `state_dict` of `step` available to `dst_ranks`."""

    @abstractmethod
    def disallow_checkpoint(self) -> None:
        """The state is about to change: from now on nothing of it may be sent."""

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive the state of `step` from the peer whose `metadata()` is given."""

    @abstractmethod
    def shutdown(self, wait: bool = True) -> None:
        """Stop serving. Idempotent."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who gives which state to whom in one quorum, as one member sees it. Ranks are replica_ranks."""

    tag: str
    """Name of the state; no other state ever has it."""
    replica_id: str
    rank: int
    """My own."""
    store: str
    """host:port/prefix in the quorum's c10d store, for this quorum and group rank only."""
    holders: tuple[int, ...]
    """Who has the state, in order."""
    healing: tuple[int, ...]
    """Who receives it, in order."""
    addresses: Mapping[int, str]
    """`metadata()` of the members."""
    donors: tuple[int, ...] = ()
    """For a receiver: whom to receive from, preferred first."""
    relays: tuple[int, ...] = ()
    """For a receiver: who receives, too, and may pass it on."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """What a receiver brings along; each as for `http.client.fetch`."""

    into: object = None
    have: Prefetched | None = None
    own: OwnState | None = None
    gauge: Gauge | None = None
    cancel: Event | None = None
    deadline_s: float | None = field(default=None, kw_only=True)


class LiveTransport(CheckpointTransport[T]):
    """See the file's header. `offer`, `refuse` and `close` on the training thread or quorum worker, one at a time."""

    server: StateServer

    @abstractmethod
    def mark(self, state: object) -> None:
        """Training thread, at a boundary: `state` is complete when its devices have done what was launched so far."""

    @abstractmethod
    def offer(self, exchange: Exchange, state: object) -> None:
        """Serve a state to the members that heal, until `close`. Raises `EncodingError`; does not wait for anybody."""

    @abstractmethod
    def refuse(self, exchange: Exchange, why: str) -> None:
        """Let those who would receive know that this replica cannot send it."""

    @abstractmethod
    def close(self) -> None:
        """Nothing offered is served any more: the state is about to change. Waits for nobody."""

    @abstractmethod
    def receive(self, exchange: Exchange, receiver: Receiver) -> FetchResult:
        """Receive the state, verified. Blocks; raises HealError, `StateRefusedError` where trying again cannot help."""

    @abstractmethod
    def prefetch(
        self, donors: Sequence[str], *, into: object = None, deadline_s: float | None = None,
        given_s: float | None = None, cancel: Event | None = None, own: OwnState | None = None,
        gauge: Gauge | None = None,
    ) -> Prefetched | None:  # fmt: skip
        """Copy live state before joining, as `http.client.prefetch`; None: this transport does not."""

    @abstractmethod
    def get_blob(self, address: str, name: str, *, timeout_s: float | None = None, bytes_max: int = 0) -> bytes | None:
        """What the replica at `address` answers to `name`, as `http.client.get_blob`."""
