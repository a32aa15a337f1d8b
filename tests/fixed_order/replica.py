"""`Follower`: a replica of tests/runtime's harness that trains with FixedOrderDataParallel.

Points where faults can be ordered, in order: boundary (between two steps), started (the step's first batch is there),
forward (of its last micro-batch), backward, stepped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.data import ElasticDataLoader
from ft_core.fixed_order import FixedOrderDataParallel
from ft_core.optim import OptimizerWrapper
from tests.fixed_order import reference
from tests.fixed_order.reference import Job, Points
from tests.runtime.harness import Replica

if TYPE_CHECKING:
    from torch import nn


class Follower(Replica):
    """One training process, as a thread."""

    loader: ElasticDataLoader
    ddp: nn.Module

    def __init__(self, index: int, job: Job, *, loader: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(index, build=job.build, optim=job.optim, seed=0, **options)
        self.job = job
        self.loader_options = loader or {}
        self.losses: dict[int, float] = {}
        """Of each step that I committed, by its number."""

    def digest(self) -> str:
        return reference.digest(self.model.state_dict(), self.inner.state_dict())

    def wrap(self) -> None:
        job = self.job
        self.loader = ElasticDataLoader(
            Points(job.length), job.batch_size, shuffle=True, seed=job.seed, manager=self.manager,
            global_batch_size=job.global_batch_size, fixed_micro_batches=True, **self.loader_options,
        )  # fmt: skip
        self.ddp = FixedOrderDataParallel(self.manager, self.model, self.loader)
        self.optimizer = OptimizerWrapper(self.manager, self.inner)

    def train(self) -> None:
        for _epoch in self.loader.epochs(self.job.epochs):
            self.one_epoch()
        self.manager.leave("finished", finished=True)
        self.loader.close()

    def one_epoch(self) -> None:
        self.step = self.manager.current_step()
        self.at("boundary")
        first = True
        for batch in self.loader:
            if first:
                self.optimizer.zero_grad()
                self.at("started")
            first = last = self.loader.last_micro_batch
            loss = self.job.loss(self.ddp, batch)
            self.wrapper.record_loss(loss)
            if last:
                self.at("forward")
            loss.backward()
            if last:
                self.vote()

    @property
    def wrapper(self) -> FixedOrderDataParallel:
        assert isinstance(self.ddp, FixedOrderDataParallel)
        return self.ddp

    def vote(self) -> None:
        self.iterations += 1
        assert self.iterations <= self._max_iterations, f"no progress: {self.manager!r}"
        participated = self.manager.is_participating()
        self.at("backward")
        self.job.clip(self.model)
        self.optimizer.step()
        self.record(self.optimizer.committed, participated)
        if self.optimizer.committed and self.wrapper.step_loss is not None:
            self.losses[self.manager.current_step()] = self.wrapper.step_loss
        self.at("stepped")
        self.step = self.manager.current_step()
        self.at("boundary")
