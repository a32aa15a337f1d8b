"""The process' random generators, kept and given back: torch's (CPU and CUDA), Python's, numpy's where it is loaded.

Threads: generators belong to the process; whoever draws in another thread meanwhile draws the same numbers again.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """What all generators stood at. Make one with `take`."""

    python: tuple[Any, ...]
    cpu: Tensor
    cuda: Sequence[Tensor]
    numpy: dict[str, Any] | None

    @classmethod
    def take(cls) -> RandomState:
        """Return the state they stand at now."""
        numpy = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else (),
            numpy=None if numpy is None else numpy.random.get_state(legacy=False),
        )

    def restore(self) -> None:
        """Let them go on from here."""
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
