"""`Counter`: a replica of tests/runtime's harness that trains the counting model on an elastic loader.

Points where faults can be ordered, in order: boundary (between two steps), started (the step's first batch is there),
forward (of its last micro-batch), backward, stepped.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from ft_core.data import ElasticDataLoader
from tests.data.managed import Counting
from tests.runtime.harness import Replica

LENGTH, EPOCHS = 50, 2


class Counter(Replica):
    """One training process, as a thread."""

    model: Counting
    loader: ElasticDataLoader

    def __init__(
        self, index: int, *, length: int = LENGTH, loader: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(
            index,
            build=lambda: Counting(length, EPOCHS),
            optim=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            **options,
        )
        self.length = length
        self.options: dict[str, Any] = {"batch_size": 4, "shuffle": True} | (loader or {})
        self.epochs_seen: list[int] = []
        self.samples: list[int] = []
        """Of each of my committed steps, over all replicas."""

    def wrap(self) -> None:
        super().wrap()
        self.loader = ElasticDataLoader(list(range(self.length)), manager=self.manager, **self.options)  # type: ignore[arg-type]

    def train(self) -> None:
        for epoch in self.loader.epochs(EPOCHS):
            self.epochs_seen.append(epoch)
            self.one_epoch()
        self.manager.leave("finished", finished=True)

    def one_epoch(self) -> None:
        self.step = self.manager.current_step()
        self.at("boundary")
        first = True
        for batch in self.loader:
            if first:
                self.optimizer.zero_grad()
                self.at("started")
            first = last = self.loader.last_micro_batch
            with contextlib.nullcontext() if last else self.no_sync():
                loss = self.model.loss(self.ddp, self.loader, batch)
                if last:
                    self.at("forward")
                loss.backward()
            if last:
                self.vote()

    def vote(self) -> None:
        self.iterations += 1
        assert self.iterations <= self._max_iterations, f"no progress: {self.manager!r}"
        participated, samples = self.manager.is_participating(), self.loader.step_samples
        self.at("backward")
        self.optimizer.step()
        self.record(self.optimizer.committed, participated)
        if self.optimizer.committed:
            self.samples.append(samples)
        self.at("stepped")
        self.step = self.manager.current_step()
        self.at("boundary")

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        assert isinstance(self.ddp, nn.parallel.DistributedDataParallel)
        return self.ddp.no_sync()
