"""Digests of replicated state, compared on request: finds replicas that silently differ (bit flips, unseeded code).

How it works. Before a commit that is due, every member hashes its floating point state (parameters and optimizer state;
not what forward changes) and the digests travel in one reduction with a slot of its own per member, four 16-bit pieces
each, because a sum of digests could not be compared. All members see the same vector, so all name the same minority:
those whose digest is not the most frequent one (of equally frequent ones, the lowest rank's is kept). The step is
vetoed, the minority's state becomes VOID and it heals.

Such a comparison is also made when the fence says that members differ in the part of their parameters that each step
looks at (`state_sample`). Replicas that differ again soon after they were healed compute differently (other hardware,
another library): healing does not help, so after TIRED_AFTER times within TIRED_STEPS commits they are told, once, and
left alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ft_core.checkpointing.tensor_bytes import byte_view, checksum
from ft_core.checkpointing.tree import tensors_in
from ft_core.runtime.state_sample import StateSample

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.reduction.interface import GradientReducer
    from ft_core.runtime.communicators import Communicators

log = logging.getLogger("ft_core")
PIECES = 4
SLOTS = PIECES + 1
"""Per member: its digest, and whether it sent one (a member that is behind has nothing to compare)."""
DIFFERS = "differs from the others': it will heal"
"""How the sentence about a difference ends."""
TIRED_AFTER, TIRED_STEPS = 3, 1000
"""So many differences that the fence showed, within so many commits, are not accidents."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The outcome: replica_ranks that differ from the majority, whether I am one, and a sentence naming them."""

    differing: tuple[int, ...]
    mine: bool
    text: str


class ParityCheck:
    """Decides when a check is due, and makes it."""

    def __init__(self, every: int, sample_steps: int) -> None:
        self._every = every
        self._sample_steps = sample_steps
        self._sample: StateSample | None = None
        self._differed: deque[int] = deque(maxlen=TIRED_AFTER)

    def __repr__(self) -> str:
        return f"ParityCheck(every={self._every}, {self._sample!r})"

    def due(self, base_step: int) -> bool:
        """Whether the attempt that builds on `base_step` carries a check: the same on all members."""
        return self._every > 0 and base_step > 0 and base_step % self._every == 0

    def sample(self, step: int, reducers: Sequence[GradientReducer]) -> int | None:
        """Digest of the part of the parameters that `step` looks at; None: nothing is compared."""
        if self._sample_steps <= 0 or step <= 0 or not reducers:
            return None
        if self._sample is None:
            self._sample = StateSample([p for reducer in reducers for p in reducer.parameters], self._sample_steps)
        return self._sample.take(step)

    def tires(self, step: int, found: Difference) -> bool:
        """The fence of `step` showed a difference; `found`: which. True: it is to be tolerated from now on."""
        self._differed.append(step)
        tired = len(self._differed) == TIRED_AFTER and step - self._differed[0] < TIRED_STEPS
        if not found.differing:
            log.error(
                "step %d: the parameters of the replicas differ, and what a heal would bring does not: is the model in "
                "what state_dict returns?", step
            )  # fmt: skip
        if tired:
            log.error(
                "the replicas' parameters differed %d times within %d steps although they were healed: they compute "
                "differently (other hardware or library versions, randomness that is not seeded alike, a callback that "
                "changes weights on some of them). They are not compared any more, and train on with different "
                "weights. If that is known and wanted, pass parity_sample_steps=0 on all replicas",
                TIRED_AFTER, step - self._differed[0] + 1,
            )  # fmt: skip
        return tired

    def compare(self, mine: int | None, plan: Plan, communicators: Communicators) -> Difference:
        """Exchange digests over the control group; None: I do not hold the state to compare. Raises what it raises."""
        slots = torch.zeros(plan.size * SLOTS)
        if mine is not None:
            first = plan.replica_rank * SLOTS
            for piece in range(PIECES):
                slots[first + piece] = float((mine >> (16 * piece)) & 0xFFFF)
            slots[first + PIECES] = 1.0
        communicators.sum(slots, communicators.control()).wait()
        values = [int(v) for v in slots.tolist()]
        digests = [
            sum(values[first + piece] << (16 * piece) for piece in range(PIECES)) if values[first + PIECES] else None
            for first in range(0, plan.size * SLOTS, SLOTS)
        ]
        differing = judge(digests)
        names = ", ".join(plan.quorum.members[rank].replica_id for rank in differing)
        return Difference(differing, plan.replica_rank in differing, f"the state of {names} {DIFFERS}")


def judge(digests: list[int | None]) -> tuple[int, ...]:
    """Ranks that do not hold the most frequent digest; None: not compared (it is healing)."""
    known = [d for d in digests if d is not None]
    if not known:
        return ()
    count = Counter(known)
    most = max(count.values())
    truth = next(d for d in known if count[d] == most)
    return tuple(rank for rank, d in enumerate(digests) if d is not None and d != truth)


def digest(state: Mapping[str, Any], volatile: Collection[int]) -> int:
    """64-bit digest of the floating point tensors in `state`, except those in `volatile` storages."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors_in(state):
        if not tensor.is_floating_point() or tensor.untyped_storage().data_ptr() in volatile:
            continue
        # xxh3 runs at 6 GB/s and more and releases the GIL; blake2b alone would be many times slower on large states.
        flat = tensor.detach().contiguous().cpu()
        hashed.update(checksum(byte_view(flat)).to_bytes(8, "little") if flat.numel() else b"\0")
    return int.from_bytes(hashed.digest(), "little")
