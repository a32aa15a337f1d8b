"""`Replayable`: a sampler whose order follows from (seed, epoch) alone, on every replica and after every restart.

How it works. A sampler of the user's (weighted, subset, ...) draws from torch's, Python's or numpy's global generator
or from one of its own. All are set for the time it draws, and put back afterwards.

Threads: the training thread.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCH_STRIDE = 1_000_003
"""Between the seeds of two epochs; a prime, so that seeds and epochs seldom meet."""


class Replayable(Sampler[Any]):
    """Wraps a sampler.

    Args:
        sampler: whose order is to be the same everywhere.
        seed: of the job.
    """

    def __init__(self, sampler: Sampler[Any], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0

    def __repr__(self) -> str:
        return f"Replayable({type(self.sampler).__name__}, seed={self.seed}, epoch={self.epoch})"

    def set_epoch(self, epoch: int) -> None:
        """Called by the loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        own = getattr(self.sampler, "generator", None)
        seed = (self.seed + EPOCH_STRIDE * self.epoch) % (1 << 32)
        numpy = sys.modules.get("numpy.random")
        python_state, numpy_state = random.getstate(), numpy.get_state() if numpy is not None else None
        own_state = own.get_state() if isinstance(own, torch.Generator) else None
        with torch.random.fork_rng(devices=[]):
            try:
                torch.manual_seed(seed)
                random.seed(seed)
                if numpy is not None:
                    numpy.seed(seed)
                if own is not None and own_state is not None:
                    own.manual_seed((own.initial_seed() + EPOCH_STRIDE * self.epoch) % (1 << 63))
                return iter(list(self.sampler))  # in full: a sampler may draw while it is iterated
            finally:
                random.setstate(python_state)
                if numpy is not None:
                    numpy.set_state(numpy_state)
                if own is not None and own_state is not None:
                    own.set_state(own_state)
