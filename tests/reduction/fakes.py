"""Managers and attempts for tests of the reducer: one in memory with scripted failures, one over a real Gloo group."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from ft_core.ddp import DistributedDataParallel
from ft_core.device import device_of
from ft_core.reduction.interface import FENCE_SLOTS, GradientReducer, ReductionAttempt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class FakeWork:
    """Ends when waited for: then either raises `error` or adds what the peers contributed."""

    def __init__(self, tensor: Tensor, peers: Tensor | None, error: Exception | None) -> None:
        self.tensor, self.peers, self.error = tensor, peers, error
        self.waited = False

    def wait(self) -> bool:
        assert not self.waited
        self.waited = True
        if self.error is not None:
            self.tensor.fill_(float("nan"))
            raise self.error
        if self.peers is not None:
            self.tensor += self.peers
        return True


class FakeAttempt:
    """Records launches. `peers[i]` is added to bucket i; `refuse_at`/`fail_at`: the launch, or its work, fails."""

    leaves, rides, members, weights = False, True, 1, (1, 1)

    def __init__(
        self,
        number: int = 1,
        scale: float = 1.0,
        *,
        is_source: bool = True,
        is_ready: bool = True,
        peers: Sequence[Tensor] = (),
        refuse_at: int | None = None,
        fail_at: int | None = None,
    ) -> None:
        self.number, self.scale, self.is_source, self.is_ready = number, scale, is_source, is_ready
        self.peers, self.refuse_at, self.fail_at = peers, refuse_at, fail_at
        self.events: list[str] = []
        self.sent: list[Tensor] = []
        self.works: list[FakeWork] = []
        self.errors: list[BaseException] = []
        self.reports: list[BaseException] = []
        self.tails: list[Tensor] = []

    def ready(self) -> bool:
        self.events.append("ready")
        return self.is_ready

    def launch(self, tensor: Tensor) -> FakeWork | None:
        return self._launch("bucket", tensor)

    def launch_fence(self, flat: Tensor, tail: Tensor) -> FakeWork | None:
        assert tail.numel() == FENCE_SLOTS
        assert tail.dtype == torch.float32
        assert tail.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        tail.copy_(torch.arange(1, FENCE_SLOTS + 1))
        return self._launch("fence", flat)

    def read(self, tensor: Tensor) -> Tensor:
        return tensor

    def fence_arrived(self, tail: Tensor) -> None:
        assert all(work.waited for work in self.works)
        self.events.append("arrived")
        self.tails.append(tail.clone())

    def fail(self, error: BaseException) -> None:
        self.events.append("fail")
        self.errors.append(error)

    def report(self, error: BaseException) -> None:
        self.events.append("report")
        self.reports.append(error)

    def _launch(self, event: str, tensor: Tensor) -> FakeWork | None:
        assert not self.errors, "launched after a failure"
        index = len(self.sent)
        if index == self.refuse_at:
            self.events.append("refused")
            return None
        self.events.append(event)
        self.sent.append(tensor.clone())
        error = RuntimeError("connection closed by peer") if index == self.fail_at else None
        work = FakeWork(tensor, self.peers[index] if index < len(self.peers) else None, error)
        self.works.append(work)
        return work


class FakeHost:
    """The Manager as a reducer sees it."""

    def __init__(self, attempt: ReductionAttempt | None = None) -> None:
        self.attempt = attempt
        self.reducers: list[GradientReducer] = []
        self.backend, self.through_host, self.batch_ratio, self.device_of = "gloo", True, 1.0, device_of

    @property
    def hooks(self) -> FakeHost:
        return self

    def register_reducer(self, reducer: GradientReducer) -> None:
        self.reducers.append(reducer)

    def unregister_reducer(self, reducer: GradientReducer) -> None:
        self.reducers.remove(reducer)

    def current_attempt(self) -> ReductionAttempt | None:
        return self.attempt

    def start(self, **kwargs: Any) -> FakeAttempt:
        self.attempt = attempt = FakeAttempt(**kwargs)
        return attempt


def wrap(module: nn.Module, **kwargs: Any) -> tuple[Any, FakeHost]:
    """The wrapper (Any: tests reach deep into modules) and its manager."""
    host = FakeHost()
    return DistributedDataParallel(host, module, **kwargs), host


class GlooAttempt:
    """An attempt of a healthy quorum: everything goes to a process group."""

    leaves, rides, members, weights = False, True, 1, (1, 1)

    def __init__(self, number: int, group: dist.ProcessGroup, *, contributing: bool = True) -> None:
        self.number, self.group = number, group
        self.scale = 1.0 / group.size() if contributing else 0.0
        self.is_source = group.rank() == 0
        self.launches = 0
        self.verdict: bool | None = None

    def ready(self) -> bool:
        return True

    def launch(self, tensor: Tensor) -> Any:
        self.launches += 1
        return self.group.allreduce([tensor])

    def launch_fence(self, flat: Tensor, tail: Tensor) -> Any:
        tail.zero_()
        tail[0] = 1.0
        return self.launch(flat)

    def read(self, tensor: Tensor) -> Tensor:
        return tensor

    def fence_arrived(self, tail: Tensor) -> None:
        self.verdict = bool(tail[0] == self.group.size())

    def fail(self, error: BaseException) -> None:
        raise AssertionError("no failure expected") from error

    report = fail


class GlooHost(FakeHost):
    """A Manager whose quorum never changes: every step is one attempt over `group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.steps = 0

    def start_quorum(self, *, contributing: bool = True) -> GlooAttempt:
        self.steps += 1
        self.attempt = attempt = GlooAttempt(self.steps, self.group, contributing=contributing)
        return attempt

    def should_commit(self) -> bool:
        attempt = self.attempt
        assert isinstance(attempt, GlooAttempt)
        for reducer in self.reducers:
            reducer.flush()
        assert attempt.verdict is not None
        for reducer in self.reducers:
            (reducer.committed if attempt.verdict else reducer.vetoed)()
        return attempt.verdict


def run_ranks(target: Callable[..., None], world_size: int, *args: object) -> None:
    """Run `target(rank, world_size, store_path, *args)` in new processes; a failure in one is raised here."""
    with tempfile.TemporaryDirectory() as directory:
        start: Any = spawn
        start(target, args=(world_size, f"{directory}/store", *args), nprocs=world_size)


def open_group(rank: int, world_size: int, store: object) -> dist.ProcessGroup:
    """A Gloo group of its own, not the default one."""
    gloo: Any = dist.ProcessGroupGloo
    group: dist.ProcessGroup = gloo(store, rank, world_size, timedelta(seconds=30))
    return group
