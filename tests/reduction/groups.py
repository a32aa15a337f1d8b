"""Replica groups of several ranks, one thread per rank: inside over torch's Gloo, across over the project's own."""

from __future__ import annotations

import gc
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not listed as exported

from ft_core.loop.group_model import GroupModel
from ft_core.loop.inside_group import InsideGroup
from ft_core.process_group import ProcessGroupGloo
from tests.reduction.fakes import FakeHost, open_group

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import Tensor, nn

TIMEOUT_S = 20.0
RECEIVED_AT = 128
"""Where Linux's tcp_info has the number of bytes received, 64 bits."""


class RingAttempt:
    """An attempt over a ring. `weight`: of this member; `breaks_at`: the launch at which it breaks, -1: at once."""

    def __init__(self, member: Member, number: int, weight: int, breaks_at: int | None, *, rides: bool) -> None:
        self.member, self.number, self.breaks_at, self.rides = member, number, breaks_at, rides
        self.leaves = False
        self.members = member.groups
        self.weights = (weight, weight)
        self.scale = weight / member.groups
        self.is_source = member.group == 0
        self.sent: list[int] = []
        """Bytes of each launch."""
        self.errors: list[BaseException] = []
        self.reports: list[BaseException] = []
        self.verdict: bool | None = None

    def ready(self) -> bool:
        if self.breaks_at == -1:
            self._break()
        return self.usable

    @property
    def usable(self) -> bool:
        return not self.errors

    def launch(self, tensor: Tensor) -> Any:
        if self.breaks_at == len(self.sent):
            self._break()
        if not self.usable:
            return None
        self.sent.append(tensor.numel() * tensor.element_size())
        return self.member.ring.allreduce([tensor])

    def launch_fence(self, flat: Tensor, tail: Tensor) -> Any:
        tail.zero_()
        tail[0] = 1.0
        return self.launch(flat)

    def read(self, tensor: Tensor) -> Tensor:
        return tensor

    def fence_arrived(self, tail: Tensor) -> None:
        self.verdict = bool(tail[0] == self.members)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.member.ring.abort()

    def report(self, error: BaseException) -> None:
        self.reports.append(error)

    def _break(self) -> None:
        self.fail(RuntimeError("connection closed by peer"))


def _alone(_: object) -> None:
    """The ranks are on different machines."""


class Member(FakeHost):
    """One rank: the Manager as its reducers see it, its ring, and the way to the other ranks of its group."""

    def __init__(self, world: World, group: int, rank: int) -> None:
        super().__init__()
        self.world, self.group, self.rank = world, group, rank
        self.groups, self.ranks = world.groups, world.ranks
        self.number = group * world.ranks + rank
        self.ring = ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S), hostname="127.0.0.1")
        self.inside = InsideGroup(world.ranks)
        self.models: list[GroupModel] = []
        self.steps = 0

    def open(self) -> None:
        """Connect; on all ranks."""
        if self.ranks > 1:
            group: Any = open_group(self.rank, self.ranks, PrefixStore(f"{self.group}", self.world.inside))
            self.inside._group = group
            if not self.world.shared:
                self.inside.share = _alone  # type: ignore[method-assign,assignment]
        self.form()

    def form(self) -> None:
        """(Re)form the ring; on all of its members."""
        address = f"127.0.0.1:{self.world.store.port}/{self.rank}/{self.steps}"
        self.ring.configure(address, f"group-{self.group}", self.group, self.groups)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        manager: Any = self
        self.models.append(GroupModel(manager, self.inside, module, **options))
        return self.models[-1]

    def start_quorum(self, weight: int = 1, breaks_at: int | None = None, *, rides: bool = True) -> RingAttempt:
        self.steps += 1
        attempt = RingAttempt(self, self.steps, weight, breaks_at, rides=rides)
        self.attempt = attempt
        return attempt

    def received(self) -> int:
        """Bytes that came over the connections of its ring."""
        total = 0
        for fd in self.ring.connection_fds():
            with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_AT + 8)
            total += struct.unpack_from("Q", info, RECEIVED_AT)[0]
        return total


class World:
    """All ranks of all groups. `shared`: they see each other's memory; else they send messages."""

    shared = True

    def __init__(self, groups: int, ranks: int) -> None:
        self.groups, self.ranks = groups, ranks
        self.inside = HashStore()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.members = [Member(self, group, rank) for group in range(groups) for rank in range(ranks)]
        self._threads = ThreadPoolExecutor(len(self.members))

    def __enter__(self) -> World:
        self.run(Member.open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            member.ring.shutdown()
            member.inside._group = None
            for model in member.models:
                model.retire()  # its hooks would keep all groups, whose threads wake up a hundred times a second
        self._threads.shutdown()
        gc.collect()  # works, which hold connections, are in cycles

    def run(self, target: Callable[[Member], Any]) -> list[Any]:
        """Call `target` with each member, all at once. Who is left waiting is an error."""
        futures = [self._threads.submit(target, member) for member in self.members]
        return [future.result(TIMEOUT_S) for future in futures]
