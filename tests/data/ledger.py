"""The ledger: which samples are in a model. It heals with the model, so a lost or repeated sample cannot hide.

A `Ledger` is part of a replica's state, like its parameters: `commit` is what an optimizer step does with the gradients
of everybody who contributed, and a replica that heals gets the ledger of its donor. Whoever survives holds the history
of the surviving lineage, and only that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class Ledger:
    """Samples per epoch in the order in which they were committed."""

    entries: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def commit(self, epoch: int, indices: Iterable[int]) -> None:
        """One committed step and the samples whose gradients are in it."""
        self.entries.append((epoch, tuple(sorted(indices))))

    def copy(self) -> Ledger:
        return Ledger(list(self.entries))

    def faults(self, epochs: int, length: int) -> list[str]:
        """What is wrong with the first `epochs` epochs of `length` samples: each must be there once."""
        out = []
        for epoch in range(epochs):
            counts = Counter(index for e, indices in self.entries if e == epoch for index in indices)
            lost = sorted(set(range(length)) - set(counts))
            twice = sorted(index for index, count in counts.items() if count > 1)
            foreign = sorted(index for index in counts if not 0 <= index < length)
            for name, wrong in (("lost", lost), ("twice", twice), ("foreign", foreign)):
                if wrong:
                    out.append(f"epoch {epoch}: {name} {wrong}")
        later = {epoch for epoch, _ in self.entries} - set(range(epochs))
        return out + ([f"samples of epochs {sorted(later)}"] if later else [])
