"""One process without any fault tolerance: the trajectory that every run must have. Nothing of ft_core sums here.

What is taken from ft_core is the order of the samples; the seed of a micro-batch is written out again from its
documentation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from ft_core.data.epoch_order import EpochOrder
from tests.runtime.harness import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FEATURES, CLASSES = 6, 3


class Points(Dataset[tuple[Tensor, int]]):
    """Samples that follow from their numbers; with `noise`, a little random each time."""

    def __init__(self, length: int, noise: float = 0.0) -> None:
        self.noise = noise
        generator = torch.Generator().manual_seed(99)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (length,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + self.noise * torch.randn(FEATURES) * random.random(), self.y[index]


@dataclass(frozen=True)
class Job:
    """What is trained, on what and how."""

    build: Callable[[], nn.Module]
    optim: Callable[[nn.Module], torch.optim.Optimizer]
    length: int = 50
    epochs: int = 2
    batch_size: int = 3
    global_batch_size: int = 14
    seed: int = 5
    max_norm: float | None = None
    noise: float = 0.0
    decay: float | None = None
    """Of the learning rate, per step."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x).float(), y)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        return None if self.decay is None else torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)

    def clip(self, model: nn.Module) -> None:
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)


def digest(*states: Any) -> str:
    """Of every bit; numpy knows no bfloat16, float32 holds it exactly."""
    wide = tree_map_only(Tensor, lambda t: t.float() if t.dtype == torch.bfloat16 else t, states)
    return digest_of(*wide)


def _with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, CLASSES))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


PROCESSES = Job(
    _with_dropout, _adamw, length=605, epochs=2, batch_size=4, global_batch_size=22, max_norm=0.5, noise=0.3,
    decay=0.999,
)  # fmt: skip
"""What the processes train."""


def in_order(terms: Sequence[Any]) -> Any:
    """Split at the largest power of two below their number; the sum of the sums of both parts."""
    if len(terms) == 1:
        return terms[0]
    half = 1
    while 2 * half < len(terms):
        half *= 2
    return in_order(terms[:half]) + in_order(terms[half:])


def seed(text: str) -> None:
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    torch.manual_seed(number)
    random.seed(number)


def run(job: Job) -> tuple[str, list[float]]:
    """Digest of the final state, and the loss of every step."""
    torch.manual_seed(0)
    model = job.build()
    optimizer = job.optim(model)
    schedule = job.schedule(optimizer)
    data = Points(job.length, job.noise)
    losses: list[float] = []
    for epoch in range(job.epochs):
        order = EpochOrder(job.length, job.seed, epoch, shuffle=True)
        for start in range(0, job.length, job.global_batch_size):
            stop = min(job.length, start + job.global_batch_size)
            losses.append(step(job, model, optimizer, data, order, epoch, start, stop))
            if schedule is not None:
                schedule.step()
    return digest(model.state_dict(), optimizer.state_dict()), losses


def step(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, data: Points, order: EpochOrder, epoch: int,
    start: int, stop: int,
) -> float:  # fmt: skip
    gradients: list[list[Tensor | None]] = []
    losses: list[float] = []
    for first in range(start, stop, job.batch_size):
        last = min(stop, first + job.batch_size)
        samples = []
        for index in order.indices(((first, last),), job.global_batch_size):
            seed(f"{job.seed} {epoch} {index}")
            samples.append(data[index])
        seed(f"{job.seed} {epoch} {((first, last),)}")
        optimizer.zero_grad()
        loss = job.loss(model, (torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])))
        loss.backward()
        share = (last - first) / (stop - start)
        gradients.append([None if p.grad is None else p.grad * share for p in model.parameters()])
        losses.append(float(loss.detach().double()) * share)
    for index, parameter in enumerate(model.parameters()):
        terms = [g[index] for g in gradients]
        used = any(term is not None for term in terms)
        zeros = torch.zeros_like(parameter)
        parameter.grad = in_order([zeros if term is None else term for term in terms]) if used else None
    job.clip(model)
    optimizer.step()
    loss_of_step: float = in_order(losses)
    return loss_of_step
