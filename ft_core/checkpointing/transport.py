"""`CheckpointTransport`: how a step's state moves to healing peers, as an interface for transports of one's own.

Life of a step: on the donor `send_checkpoint` (at the step boundary), then `disallow_checkpoint` before the optimizer
changes anything; on the healing side `recv_checkpoint` with the donor's `metadata()`. All on the training thread or the
Manager's executor, never two calls of one transport at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from datetime import timedelta

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
