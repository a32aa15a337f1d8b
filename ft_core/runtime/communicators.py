"""The process groups of one rank: `gradients`, given or chosen by device, and `control`, made when somebody needs it.

How it works. Collectives on one group pair up in launch order, so what must never mix travels on groups of its own
(R4). `gradients` carries the buckets, and the ballot that rides on the last of them. `control` carries what the members
tell each other in CPU memory: ballots of their own, digests, who has a lease; it is a group for CPU memory whatever
`gradients` is. Where the user gave no group, `serve` chooses one by the devices of the models that were announced,
again with each model until the first quorum. The script's own collectives go over `gradients` where no ballot rides
there, else over `control`, or, if their tensors are not in CPU memory, over one more group of the kind of `gradients`.
All are configured from the quorum's store under prefixes that name room, quorum, group rank and group, so nothing of an
older quorum can meet them.

Invariants: nothing is launched on a group before `configure` or after `abort`; `abort` may be called from any thread,
at any time, and ends what is pending. Ownership: `configure` runs on the quorum worker; `serve()`, `control()` and
`users()` on the training thread, the last two on all members at the same point.
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

from ft_core.device import device_of
from ft_core.errors import CollectiveError
from ft_core.process_group import ByDevice, check_group, check_tensors, host_process_group
from ft_core.protocol.rank.ballot import FENCE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.device import Device
    from ft_core.process_group import ProcessGroup

ABORT_RETRY_S = 0.005
ABORT_TRIES = 200
"""An abort is repeated until no configure is under way, for at most a second."""
DEFAULT_TIMEOUT = timedelta(minutes=1)
"""Of collectives, until `set_timeout`."""
PARTING_TAG = 0x7A21
"""Of the messages between members that leave; nothing else on these groups is point to point."""
_FLOATS = struct.Struct(f"{FENCE_SLOTS}f")


def sum_options(op: ReduceOp.RedOpType) -> AllreduceOptions:
    """Options of an allreduce with `op`."""
    options = AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]  # torch's stub names the wrapper, its binding takes both
    return options


class Communicators:
    """The process groups of one rank; see the module's text."""

    def __init__(self, gradients: ProcessGroup | ByDevice) -> None:
        self._choice = gradients if isinstance(gradients, ByDevice) else None
        self._gradients = None if isinstance(gradients, ByDevice) else gradients
        self._serves: list[torch.device] | None = None
        """The devices that `gradients` was chosen for."""
        self._beside: dict[str, ProcessGroup] = {}
        """The groups beside it, by name: made once, configured anew in each quorum that needs them."""
        self._ready: set[str] = set()
        """Those that are configured for this quorum."""
        self._place: tuple[str, str, int, int] | None = None
        self._aborted = True
        self._lock = threading.Lock()
        self._formed = threading.Condition(self._lock)
        self._forming = 0
        self._quorum_id = 0
        self._users_with_gradients = False
        self.device_of: Callable[[torch.device], Device] = device_of
        """What the host does with the memory of a device."""
        self.on_formed: Callable[[], None] = lambda: None
        """Called when one of the groups has formed."""
        self._told: list[Work] = []
        """Messages to members that have left; kept as long as they may be read."""
        self._timeout = DEFAULT_TIMEOUT
        self._sum = sum_options(ReduceOp.SUM)
        self._slots = array.array("f", bytes(_FLOATS.size))
        self._slots_tensor = torch.frombuffer(self._slots, dtype=torch.float32)

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "up"
        return f"Communicators({state}, gradients={self._gradients or self._choice!r}, beside={sorted(self._ready)})"

    @property
    def gradients(self) -> ProcessGroup:
        """The group of the gradients; there is one from the first model on, or the first quorum."""
        assert self._gradients is not None, "serve() chooses it"
        return self._gradients

    @property
    def chosen(self) -> ProcessGroup | None:
        """The same; None as long as there is none."""
        return self._gradients

    @property
    def backend(self) -> str:
        """The name of its backend; '' before it is chosen."""
        return "" if self._gradients is None else str(self._gradients.getBackendName())

    def serve(self, devices: Sequence[torch.device]) -> None:
        """Choose the group of the gradients by the devices of all models; one that was given is checked.

        Before the first quorum: with each model that is announced, and then once more.

        Args:
            devices: of the trained parameters; none: there is no model, and the script reduces by itself.

        Raises:
            ConfigError: no group carries gradients on these devices, or the one that was given does not.
            NotAvailableError: the group needs something that is not there.
        """
        if self._choice is None:
            check_group(self.gradients, devices)
        elif self._gradients is None or self._serves != list(devices):
            chosen = self._choice.make(devices or None)
            chosen.set_timeout(self._timeout)
            with self._lock:
                before, self._gradients, self._serves = self._gradients, chosen, list(devices)
            if before is not None:
                before.shutdown()

    def configure(self, store_prefix: str, replica_id: str, rank: int, world_size: int, *, rides: bool) -> None:
        """(Re)build the groups for one quorum. Raises what they raise.

        `rides`: the ballots ride on the gradients, so `control` is built when somebody needs it, if at all.
        """
        with self._lock:
            self._place = (store_prefix, replica_id, rank, world_size)
            self._ready.clear()
            self._told = []
            self._users_with_gradients = not rides
            self._check()
        self._form(self.gradients, f"{store_prefix}/gradients")
        self.on_formed()
        if not rides or not self.gradients.carries_cpu_memory:
            self.control()

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

    def control(self) -> ProcessGroup:
        """The group for CPU memory, configured. All members of the quorum must call this at the same point."""
        return self._group("control", self._new_control)

    def check(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """See that `users` has a group for each of a collective's tensors. Raises ConfigError; changes nothing."""
        check_tensors(name, self.gradients, tensors)

    def users(self, tensor: torch.Tensor) -> ProcessGroup:
        """The group for a collective of the script's over `tensor`, configured; on all members at the same point."""
        in_cpu_memory = self.device_of(tensor.device).immediate
        if self._users_with_gradients and (self.gradients.carries_cpu_memory or not in_cpu_memory):
            return self.gradients
        return self.control() if in_cpu_memory else self._group("users", self.gradients.sibling)

    def _new_control(self) -> ProcessGroup:
        return self.gradients.sibling() if self.gradients.carries_cpu_memory else host_process_group()

    def _group(self, name: str, make: Callable[[], ProcessGroup]) -> ProcessGroup:
        with self._lock:
            if self._aborted or self._place is None:
                raise CollectiveError("the process group of this quorum was aborted")
            if name not in self._beside:
                self._beside[name] = make()
                self._beside[name].set_timeout(self._timeout)
            group, prefix, ready = self._beside[name], self._place[0], name in self._ready
        if not ready:
            self._form(group, f"{prefix}/{name}")
            self._ready.add(name)
            self.on_formed()
        return group

    def connection_fds(self) -> list[int]:
        """Return the descriptors of all connections to the peers of this quorum, of which they tell."""
        found = [] if self._gradients is None else self._gradients.connection_fds()
        for name, group in list(self._beside.items()):
            if name in self._ready:  # until then it is the last quorum's, which peers end
                found += group.connection_fds()
        return found

    def sum(self, tensor: torch.Tensor, group: ProcessGroup) -> Work:
        """Launch an in-place SUM over the members of the quorum."""
        return group.allreduce([tensor], self._sum)

    def put(self, slots: Sequence[float], tail: torch.Tensor, memory: Device) -> None:
        """Write a fence's slots into `tail`, FENCE_SLOTS float32 elements in `memory`.

        Through memory of our own that is packed in one call: making a tensor of a list asks each of its numbers for its
        type, and costs five times as much.
        """
        _FLOATS.pack_into(self._slots, 0, *slots)
        memory.put(self._slots_tensor, tail)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the collective timeout of all groups."""
        self._timeout = timeout
        if self._gradients is not None:
            self._gradients.set_timeout(timeout)

    def abort(self, quorum_id: int | None = None) -> None:
        """End everything pending on all groups, here and (by closing the connections) at the peers.

        `quorum_id`: of the quorum that ended. Bad news of one quorum must not hit the next, which may be open already
        when the thread that brings it gets to run (R15).
        """
        for _ in range(ABORT_TRIES):
            with self._lock:
                if quorum_id is not None and quorum_id < self._quorum_id:
                    return
                self._aborted = True
                # One of devices may take seconds: peers that wait on the others need not.
                groups = sorted(self._groups, key=lambda group: not group.blocks_host)
            for group in groups:
                group.abort()
            with self._formed:
                # A configure that had not begun when its group was aborted would wait for peers that never come.
                if self._formed.wait_for(lambda: not self._forming, ABORT_RETRY_S):
                    return

    def abort_users(self, quorum_id: int) -> None:
        """A member is lost after the ballots: end the script's collectives, not what a peer may still wait for."""
        with self._lock:
            if quorum_id < self._quorum_id:
                return
            beside = list(self._beside.values())
            groups = [self.gradients] if self._users_with_gradients else beside
        for group in groups:
            group.abort()

    @property
    def _messages(self) -> ProcessGroup | None:
        """Where single messages between members travel."""
        return self.gradients if self.gradients.carries_cpu_memory else self._beside.get("control")

    def tell_parted(self, ranks: Sequence[int]) -> None:
        """Members that have left and wait: this one has the last fence (or does not need them any more)."""
        with contextlib.suppress(Exception):  # aborted, which tells them, too
            for rank in ranks:
                assert self._messages is not None
                self._told.append(self._messages.send([torch.zeros(1)], rank, PARTING_TAG))

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
                assert self._messages is not None
                received.append(self._messages.recv([tensor], peer, PARTING_TAG))
                sent.append(self._messages.send([told], peer, PARTING_TAG))
        for work in received:  # not for `sent`: who does not get it sees the connection close, which says the same
            with contextlib.suppress(Exception):  # that one has closed its side
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def shutdown(self) -> None:
        """Abort and release all groups."""
        self.abort()
        for group in self._groups:
            group.shutdown()

    @property
    def _groups(self) -> list[ProcessGroup]:
        """All there are."""
        return [*([] if self._gradients is None else [self._gradients]), *self._beside.values()]
