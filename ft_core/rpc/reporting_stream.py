"""A lasting stream with reports of progress and a goodbye: of a group to the lighthouse, of a rank to its leader.

Progress is a few attribute stores, which the stream's renewals carry. What is still open (an ask, a goodbye) is
presented again on every new stream.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from ft_core.protocol.lighthouse.events import Left, Progress
from ft_core.protocol.types import UNTRAINED, VOID, Version
from ft_core.rpc import codec
from ft_core.rpc.lasting_stream import StreamClient

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ft_core.protocol.pushes import Acked
    from ft_core.rpc.lasting_stream import LeaseSettings, PushHandler

A = TypeVar("A")
"""An ask, as it travels on the stream."""
M = TypeVar("M")
"""What else travels on it."""


class ReportingStream(StreamClient, Generic[A, M]):
    """What `LeaseClient` and `RankControl` have in common; see the module."""

    def __init__(self, settings: LeaseSettings, handler: PushHandler) -> None:
        super().__init__(settings, handler)
        self._open_ask: A | None = None
        self._goodbye: Left | None = None
        self._left = False
        self._doing: tuple[int, str, Version, float] = (0, "", VOID, 0.0)
        """Step, phase, stable version, and until when a pause lasts (monotonic s; 0: there is none)."""

    @abstractmethod
    def _encode(self, message: A | M | codec.Renewal | Left) -> bytes:
        """A message after the opening one."""

    @abstractmethod
    def _still_open(self) -> Iterable[A | M | None]:
        """What has to be presented on a new stream, besides a goodbye. Called with the lock held."""

    @abstractmethod
    def _can_part(self) -> bool:
        """A goodbye can reach the other side, now or later. Called with the lock held."""

    # ------------------------------------------------------------ public

    def progress(self, step: int, phase: str, stable: Version, paused_s: float = 0.0) -> None:
        """Note where training is; cheap. `paused_s` > 0: busy for at most that long; its changes are sent at once.

        So is the first trained state that became stable: without it the lighthouse takes this replica for one that
        has nothing to lose, and forms a quorum of newcomers should the connection close now (R2).
        """
        first, was = self._doing[2] <= UNTRAINED < stable, self._doing[3]
        until = time.monotonic() + paused_s if paused_s > 0 else 0.0
        self._doing = (step, phase, stable, until)
        if first or until or was:
            with self._changed:
                self._renew_now()

    def leave(
        self, reason: str, finished: bool, version: Version, agreed: bool, timeout_s: float, over: bool = False
    ) -> bool:
        """Say goodbye and close the stream; True if the other side acknowledged it within `timeout_s`.

        Args:
            reason: for logs.
            finished: training is over, the room stays closed for latecomers (R16).
            version: the state this replica leaves with.
            agreed: the other members know, change-wanted rode in the last fence.
            timeout_s: how long to wait for the other side.
            over: the script has ended by itself, so nobody misses this state (R21).
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._open_ask = None
            if self._fatal is None and not self._left and self._can_part():
                self._parting = True
                self._goodbye = Left(self.settings.replica_id, 0, reason, finished, version, agreed, over)
                self._send(self._encode(self._goodbye), last=True)
            self._changed.wait_for(
                lambda: self._left or self._stopping or self._fatal is not None or not self._can_part(),
                max(0.0, deadline - time.monotonic()),
            )
            self._wanted = self.connected = False
            self._goodbye = None
            self._close_stream()
            return self._left

    # ------------------------------------------------------------ the stream

    def _paused_s(self, now: float) -> float:
        until = self._doing[3]
        return max(0.0, until - now) if until else 0.0

    def _renewal(self, now: float) -> bytes:
        step, phase, stable, _ = self._doing
        progress = Progress("", 0, step, phase, stable, self._paused_s(now), healed=self.settings.healed())
        return self._encode(codec.Renewal(now, progress))

    def _resend(self) -> list[bytes]:
        return [self._encode(message) for message in (*self._still_open(), self._goodbye) if message is not None]

    def _on_acked(self, acked: Acked) -> None:
        super()._on_acked(acked)
        if acked.clock_s == 0.0:
            with self._changed:
                self._left = self._goodbye is not None
                if self._left:
                    self._wanted = False  # the other side ends the stream now: not to be opened again
                self._changed.notify_all()
