"""`FakeCommunicator`: what NCCL is to a device group, on CPU tensors, between ranks that are threads of this process.

It really reduces. The ranks of a group find each other by an identifier that rank 0 writes into the store, as NCCL's
do. The n-th collective of all ranks is one; when the last rank has launched it, its results are written, at once or,
while its `Fabric` is held, when that is let go. Messages pair up by sender, receiver and order.

It is as unhelpful as the real one: an abort ends this rank's collectives with garbage and without an error; a peer's
end is seen by `query` alone; what NCCL has not (AVG it has; BOR, messages from any source, lists of lists) is refused.
And it can be told to delay, to fail, to return garbage, and to hang: in init, in a launch, in abort.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from ft_core.process_group import ProcessGroupNCCL
from ft_core.process_group.device.incarnation import Incarnation
from ft_core.process_group.device.tensors import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from torch._C._distributed_c10d import Store

    from ft_core.process_group.device.communicator import Communicator
    from ft_core.process_group.spec import Spec

GARBAGE = -777.0
"""What an abort leaves in the tensors of what it cut short."""
HANG_S = 30.0
"""How long what hangs hangs, if nobody lets it go."""
_fabrics: dict[str, Fabric] = {}
_counter = itertools.count()


@dataclass
class Behaviour:
    """What a fake is to do, of what the real one may do."""

    delay_s: float = 0.0
    """Between the moment all ranks have launched a collective and its end."""
    init_error: Exception | None = None
    launch_error: Exception | None = None
    abort_error: Exception | None = None
    async_error: str | None = None
    garbage: bool = False
    """Collectives of this rank end with garbage, and nobody is told."""
    hang_init: threading.Event | None = None
    hang_launch: threading.Event | None = None
    hang_abort: threading.Event | None = None
    hang_freeing: threading.Event | None = None
    """In abort, when its collectives have ended."""
    calls: list[str] = field(default_factory=list)
    """What was called, in this order: a call begins as `name` and ends as `/name`."""


class Fabric:
    """What connects the ranks of one group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.arrived: dict[Any, dict[int, FakeLaunched]] = {}
        self.gone: set[int] = set()
        self.connected: set[int] = set()
        self.held = False

    def hold(self) -> None:
        """Finish nothing until `let_go`."""
        with self.changed:
            self.held = True

    def let_go(self) -> None:
        with self.changed:
            self.held = False
            for meeting in list(self.arrived):
                self._finish(meeting)

    def arrive(self, meeting: Any, rank: int, launched: FakeLaunched, needed: int) -> None:
        with self.changed:
            launched.needed = needed
            self.arrived.setdefault(meeting, {})[rank] = launched
            self._finish(meeting)

    def _finish(self, meeting: Any) -> None:
        ranks = self.arrived[meeting]
        some = next(iter(ranks.values()))
        if self.held or len(ranks) < some.needed or any(launched.ended for launched in ranks.values()):
            return
        del self.arrived[meeting]
        with torch.no_grad():
            if isinstance(meeting, tuple):
                source, target = meeting[:2]
                ranks[target].outputs[0].copy_(ranks[source].outputs[0])
            elif some.name != "barrier":
                COLLECTIVES[some.name]([ranks[rank].arguments for rank in range(self.world_size)])
        for launched in ranks.values():
            launched.finish(good=True)
        self.changed.notify_all()


class FakeLaunched:
    """One collective of one rank."""

    def __init__(self, name: str, arguments: tuple[Any, ...], fabric: Fabric, behaviour: Behaviour) -> None:
        self.name = name
        # Reads what is sent now: a stream would, too, before anything that follows.
        self.arguments = arguments
        self.outputs = list(tensors_of(arguments[:1]))
        self.needed = fabric.world_size
        self.ended = False
        self.cut_short = False
        self._fabric = fabric
        self._behaviour = behaviour
        self._done_at = 0.0
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def finish(self, *, good: bool) -> None:
        """It ends on the device; under the fabric's lock."""
        if self.ended:
            return
        if not good or self._behaviour.garbage:
            with torch.no_grad():
                for tensor in self.outputs:
                    tensor.fill_(GARBAGE)
        self.ended, self.cut_short = True, not good
        self._done_at = time.monotonic() + self._behaviour.delay_s * good
        self._future.set_result(self.outputs)

    def order(self) -> None:
        """Block: CPU memory has no streams."""
        with self._fabric.changed:
            while not self.is_done():
                self._fabric.changed.wait(self._done_at - time.monotonic() if self.ended else None)

    def is_done(self) -> bool:
        return self.ended and (self.cut_short or time.monotonic() >= self._done_at)

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def future(self) -> torch.futures.Future[Any]:
        return self._future


class FakeCommunicator:
    """One rank of one group."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.kind = "fake NCCL 1.0"
        self.behaviour = behaviour or Behaviour()
        self.fabric: Fabric | None = None
        self.rank = 0
        self.launched: list[FakeLaunched] = []
        self._collectives = itertools.count()
        self._messages: dict[tuple[int, int], itertools.count[int]] = {}

    def init(self, store: Store, rank: int, world_size: int, checkpoint: Callable[[], None]) -> None:
        self.behaviour.calls.append("init")
        try:
            self._init(store, rank, world_size, checkpoint)
        finally:
            self.behaviour.calls.append("/init")

    def _init(self, store: Store, rank: int, world_size: int, checkpoint: Callable[[], None]) -> None:
        if self.behaviour.hang_init is not None:
            self.behaviour.hang_init.wait(HANG_S)
        if self.behaviour.init_error is not None:
            raise self.behaviour.init_error
        if rank == 0:
            name = f"fabric-{next(_counter)}"
            _fabrics[name] = Fabric(world_size)
            store.set("0", name)
        fabric = _fabrics[bytes(store.get("0")).decode()]
        self.fabric, self.rank = fabric, rank
        with fabric.changed:
            fabric.connected.add(rank)
            fabric.changed.notify_all()
            while len(fabric.connected) < world_size:
                fabric.changed.wait(0.005)
                checkpoint()

    def launch(self, name: str, *arguments: Any) -> FakeLaunched:
        self.behaviour.calls.append("launch")
        try:
            return self._launch(name, *arguments)
        finally:
            self.behaviour.calls.append("/launch")

    def _launch(self, name: str, *arguments: Any) -> FakeLaunched:
        if self.behaviour.hang_launch is not None:
            self.behaviour.hang_launch.wait(HANG_S)
        if self.behaviour.launch_error is not None:
            raise self.behaviour.launch_error
        assert self.fabric is not None
        if name not in COLLECTIVES and name not in ("barrier", "send", "recv"):
            raise NotImplementedError(f"fake NCCL has no {name}")
        if hasattr(arguments[-1], "reduceOp"):
            operation(arguments[-1].reduceOp)  # refuses what NCCL has not, before anything is sent
        if name != "barrier" and not list(tensors_of(arguments)):
            raise ValueError(f"fake NCCL: {name} of no tensor")
        launched = FakeLaunched(name, arguments, self.fabric, self.behaviour)
        self.launched.append(launched)
        if name in ("send", "recv"):
            pair = (self.rank, arguments[1]) if name == "send" else (arguments[1], self.rank)
            number = next(self._messages.setdefault(pair, itertools.count()))
            self.fabric.arrive((*pair, number), self.rank, launched, 2)
        else:
            self.fabric.arrive(next(self._collectives), self.rank, launched, self.fabric.world_size)
        return launched

    def query(self) -> str | None:
        if self.behaviour.async_error is not None:
            return self.behaviour.async_error
        fabric = self.fabric
        if fabric is None or not fabric.gone - {self.rank} or all(launched.ended for launched in self.launched):
            return None
        return f"remote rank {min(fabric.gone - {self.rank})} has gone"

    def abort(self) -> None:
        self.behaviour.calls.append("abort")
        if self.behaviour.hang_abort is not None:
            self.behaviour.hang_abort.wait(HANG_S)
        if self.behaviour.abort_error is not None:
            raise self.behaviour.abort_error
        if self.fabric is not None:
            with self.fabric.changed:
                self.fabric.gone.add(self.rank)
                for launched in self.launched:
                    launched.finish(good=False)
                self.fabric.changed.notify_all()
        if self.behaviour.hang_freeing is not None:
            self.behaviour.hang_freeing.wait(HANG_S)
        self.behaviour.calls.append("/abort")


class FakeNCCL(ProcessGroupNCCL):
    """ProcessGroupNCCL over the fake: all of it but the driver. With one rank there is no fake, as there is no NCCL."""

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        device: torch.device | str | int | None = None,
        abort_s: float = 10.0,
        behaviour: Behaviour | None = None,
    ) -> None:
        super().__init__(timeout, device=device, abort_s=abort_s)
        self.behaviour = behaviour or Behaviour()
        self.communicators: list[FakeCommunicator] = []

    def _find_device(self, device: torch.device | str | int | None) -> torch.device:
        return torch.device(device or "cpu")

    def _new_communicator(self) -> Communicator:
        self.communicators.append(FakeCommunicator(self.behaviour))
        return self.communicators[-1]


class FakeOfOne(FakeNCCL):
    """The same over the fake with one rank, too: for a test of what a library does that needs no peer."""

    def _communicator_for(self, spec: Spec) -> Communicator:
        return self._new_communicator()


def note_waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Incarnation, bool]]:
    """Each look at a group that another one waits for: which it is, and whether for its kernels alone."""
    looks: list[tuple[Incarnation, bool]] = []
    wait_ended = Incarnation.wait_ended

    def noted(before: Incarnation, checkpoint: Callable[[], None], *, kernels: bool = False) -> None:
        def note_and_check() -> None:
            looks.append((before, kernels))
            checkpoint()

        wait_ended(before, note_and_check, kernels=kernels)

    monkeypatch.setattr(Incarnation, "wait_ended", noted)
    return looks


# --------------------------------------------------------------------------------------------------- what it computes


def operation(op: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What reduces the first dimension."""
    for known, do in _OPERATIONS.items():
        if op == known:
            return do
    raise ValueError(f"fake NCCL cannot reduce with {op}")


_OPERATIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda all_of: all_of.sum(0, dtype=all_of.dtype),
    ReduceOp.AVG: lambda all_of: all_of.mean(0),
    ReduceOp.MIN: lambda all_of: all_of.amin(0),
    ReduceOp.MAX: lambda all_of: all_of.amax(0),
    ReduceOp.PRODUCT: lambda all_of: all_of.prod(0, dtype=all_of.dtype),
}

Ranks = list[tuple[Any, ...]]
"""The arguments of each rank."""


def _reduced(parts: list[torch.Tensor], opts: Any) -> torch.Tensor:
    return operation(opts.reduceOp)(torch.stack(parts))


def _allreduce(ranks: Ranks) -> None:
    for index in range(len(ranks[0][0])):
        result = _reduced([tensors[index] for tensors, _ in ranks], ranks[0][1])
        for tensors, _ in ranks:
            tensors[index].copy_(result)


def _reduce(ranks: Ranks) -> None:
    root = ranks[0][1].rootRank
    for index in range(len(ranks[0][0])):
        ranks[root][0][index].copy_(_reduced([tensors[index] for tensors, _ in ranks], ranks[0][1]))


def _broadcast(ranks: Ranks) -> None:
    opts = ranks[0][1]
    for tensors, _ in ranks:
        tensors[0].copy_(ranks[opts.rootRank][0][opts.rootTensor])


def _allgather(ranks: Ranks) -> None:
    for outputs, _, _ in ranks:
        for output, (_, inputs, _) in zip(outputs[0], ranks, strict=True):
            output.copy_(inputs[0])


def _allgather_base(ranks: Ranks) -> None:
    whole = torch.cat([given.reshape(-1) for _, given, _ in ranks])
    for output, _, _ in ranks:
        output.view(-1).copy_(whole)


def _allgather_into_tensors(ranks: Ranks) -> None:
    for index in range(len(ranks[0][0])):
        _allgather_base([(outputs[index], inputs[index], opts) for outputs, inputs, opts in ranks])


def _reduce_scatter(ranks: Ranks) -> None:
    results = [_reduced([inputs[0][j] for _, inputs, _ in ranks], ranks[0][2]) for j in range(len(ranks))]
    for (outputs, _, _), result in zip(ranks, results, strict=True):
        outputs[0].copy_(result)


def _reduce_scatter_base(ranks: Ranks) -> None:
    whole = _reduced([given for _, given, _ in ranks], ranks[0][2]).chunk(len(ranks))
    for (output, _, _), part in zip(ranks, whole, strict=True):
        output.copy_(part)


def _reduce_scatter_tensors(ranks: Ranks) -> None:
    for index in range(len(ranks[0][0])):
        _reduce_scatter_base([(outputs[index], inputs[index], opts) for outputs, inputs, opts in ranks])


def _alltoall_base(ranks: Ranks) -> None:
    n = len(ranks)
    parts = [given.split(splits) if splits else given.chunk(n) for _, given, _, splits, _ in ranks]
    for me, (output, *_) in enumerate(ranks):
        output.copy_(torch.cat([parts[other][me] for other in range(n)]))


def _alltoall(ranks: Ranks) -> None:
    copies = [[tensor.clone() for tensor in inputs] for _, inputs, _ in ranks]
    for me, (outputs, _, _) in enumerate(ranks):
        for other, output in enumerate(outputs):
            output.copy_(copies[other][me])


def _gather(ranks: Ranks) -> None:
    root = ranks[0][2].rootRank
    for output, (_, inputs, _) in zip(ranks[root][0][0], ranks, strict=True):
        output.copy_(inputs[0])


def _scatter(ranks: Ranks) -> None:
    root = ranks[0][2].rootRank
    for (outputs, _, _), given in zip(ranks, ranks[root][1][0], strict=True):
        outputs[0].copy_(given)


COLLECTIVES: dict[str, Callable[[Ranks], None]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "_allgather_base": _allgather_base,
    "allgather_into_tensor_coalesced": _allgather_into_tensors,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_tensors,
    "alltoall_base": _alltoall_base,
    "alltoall": _alltoall,
    "gather": _gather,
    "scatter": _scatter,
}
