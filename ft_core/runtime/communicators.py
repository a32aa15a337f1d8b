"""The process groups of one rank: the data lane, and a second lane that is made when somebody needs it.

How it works. Collectives on one Gloo group pair up in launch order, so what must never mix travels on groups of its
own (R4): where a fence rides on the last gradient bucket, user collectives use the second lane; where it does not, the
fence uses the second lane and user collectives the first. Both lanes are configured from the quorum's store under
prefixes that name room, quorum, group rank and lane, so nothing of an older quorum can meet them.

Invariants: nothing is launched on a lane before `configure` or after `abort`; `abort` may be called from any thread, at
any time, and ends what is pending. Ownership: `configure` runs on the quorum worker; `second()` on the training thread.
"""

from __future__ import annotations

import array
import contextlib
import struct
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import AllreduceOptions, ReduceOp, Work

from ft_core.errors import CollectiveError
from ft_core.protocol.rank.ballot import FENCE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.process_group import ProcessGroup

ABORT_RETRY_S = 0.005
ABORT_TRIES = 200
"""An abort is repeated until no configure is under way, for at most a second."""
PARTING_TAG = 0x7A21
"""Of the messages between members that leave; nothing else on these lanes is point to point."""
_FLOATS = struct.Struct(f"{FENCE_SLOTS}f")


def sum_options(op: ReduceOp.RedOpType) -> AllreduceOptions:
    """Options of an allreduce with `op`."""
    options = AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]  # torch's stub names the wrapper, its binding takes both
    return options


class Lanes:
    """The data lane `main` is the process group the user gave; the second one is its sibling."""

    def __init__(self, main: ProcessGroup) -> None:
        self.main = main
        self._second: ProcessGroup | None = None
        self._place: tuple[str, str, int, int] | None = None
        self._second_ready = False
        self._aborted = True
        self._lock = threading.Lock()
        self._formed = threading.Condition(self._lock)
        self._forming = 0
        self._quorum_id = 0
        self._user_on_main = False
        self.on_formed: Callable[[], None] = lambda: None
        """Called when one of the groups has formed."""
        self._told: list[Work] = []
        """Messages to members that have left; kept as long as Gloo may read them."""
        self._sum = sum_options(ReduceOp.SUM)
        self._slots = array.array("f", bytes(_FLOATS.size))
        self._slots_tensor = torch.frombuffer(self._slots, dtype=torch.float32)

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "up"
        return f"Lanes({state}, main={self.main!r}, second={'up' if self._second_ready else 'none'})"

    def configure(self, store_prefix: str, replica_id: str, rank: int, world_size: int, *, both: bool) -> None:
        """(Re)build the data lane, and with `both` the second one, for one quorum. Raises what the group raises."""
        with self._lock:
            self._place = (store_prefix, replica_id, rank, world_size)
            self._second_ready = False
            self._told = []
            self._user_on_main = both
            self._check()
        self._form(self.main, f"{store_prefix}/0")
        self.on_formed()
        if both:
            self.second()

    @property
    def quorum_id(self) -> int:
        """Of the quorum that was entered last."""
        return self._quorum_id

    def open(self, quorum_id: int) -> None:
        """A quorum was entered: `configure` may build its groups, unless `abort` comes first."""
        with self._lock:
            self._aborted = False
            self._quorum_id = quorum_id

    def _form(self, group: ProcessGroup, store_addr: str) -> None:
        assert self._place is not None
        _, replica_id, rank, world_size = self._place
        with self._lock:
            self._check()
            self._forming += 1
        try:
            group.configure(store_addr, replica_id, rank, world_size)
        finally:
            with self._formed:
                self._forming -= 1
                self._formed.notify_all()
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._aborted:
            raise CollectiveError("the quorum ended while its process group was being built")

    def second(self) -> ProcessGroup:
        """The second lane, configured. All members of the quorum must call this at the same point."""
        with self._lock:
            if self._aborted or self._place is None:
                raise CollectiveError("the process group of this quorum was aborted")
            if self._second is None:
                self._second = self.main.sibling()
            group, prefix, ready = self._second, self._place[0], self._second_ready
        if not ready:
            self._form(group, f"{prefix}/1")
            self._second_ready = True
            self.on_formed()
        return group

    def connection_fds(self) -> list[int]:
        """Return the descriptors of both lanes' connections to the peers of this quorum, of which they tell."""
        second = self._second if self._second_ready else None  # until then it is the last quorum's, which peers end
        return self.main.connection_fds() + (second.connection_fds() if second is not None else [])

    def sum(self, tensor: torch.Tensor, group: ProcessGroup) -> Work:
        """Launch an in-place SUM over the members of the quorum."""
        return group.allreduce([tensor], self._sum)

    def put(self, slots: Sequence[float], tail: torch.Tensor) -> None:
        """Write a fence's slots into `tail` (FENCE_SLOTS float32 elements on any device).

        Through memory of our own that is packed in one call: making a tensor of a list asks each of its numbers for its
        type, and costs five times as much.
        """
        _FLOATS.pack_into(self._slots, 0, *slots)
        tail.copy_(self._slots_tensor)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the collective timeout of the data lane."""
        self.main.set_timeout(timeout)

    def abort(self, quorum_id: int | None = None) -> None:
        """End everything pending on both lanes, here and (by closing the connections) at the peers.

        `quorum_id`: of the quorum that ended. Bad news of one quorum must not hit the next, which may be open already
        when the thread that brings it gets to run (R15).
        """
        for _ in range(ABORT_TRIES):
            with self._lock:
                if quorum_id is not None and quorum_id < self._quorum_id:
                    return
                self._aborted = True
                second = self._second
            self.main.abort()
            if second is not None:
                second.abort()
            with self._formed:
                # A configure that had not begun when its group was aborted would wait for peers that never come.
                if self._formed.wait_for(lambda: not self._forming, ABORT_RETRY_S):
                    return

    def abort_user_lane(self, quorum_id: int) -> None:
        """A member is lost after the fence: end user collectives, not the fence, which a peer may still wait for."""
        with self._lock:
            group = self.main if self._user_on_main else self._second
            stale = quorum_id < self._quorum_id
        if group is not None and not stale:
            group.abort()

    def tell_parted(self, ranks: Sequence[int]) -> None:
        """Members that have left and wait: this one has the last fence (or does not need them any more)."""
        with contextlib.suppress(Exception):  # aborted, which tells them, too
            for rank in ranks:
                self._told.append(self.main.send([torch.zeros(1)], rank, PARTING_TAG))

    def linger(self, timeout_s: float) -> None:
        """Keep the connections open until every peer parts, too, or closes its side: it has the last fence (R16).

        A peer that parts tells it by a message of its own: a collective could be paired with one of a peer that goes
        on.
        """
        with self._lock:
            if self._aborted or self._place is None:
                return
            _, _, rank, size = self._place
        deadline = time.monotonic() + timeout_s
        peers = [peer for peer in range(size) if peer != rank]
        told, heard = torch.zeros(1), [torch.zeros(1) for _ in peers]
        sent, received = [], []
        with contextlib.suppress(Exception):  # aborted, or a group of a kind that has no messages
            for peer, tensor in zip(peers, heard, strict=True):
                received.append(self.main.recv([tensor], peer, PARTING_TAG))
                sent.append(self.main.send([told], peer, PARTING_TAG))
        for work in received:  # not for `sent`: who does not get it sees the connection close, which says the same
            with contextlib.suppress(Exception):  # that one has closed its side
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def shutdown(self) -> None:
        """Abort and release both lanes."""
        self.abort()
        self.main.shutdown()
        if self._second is not None:
            self._second.shutdown()
