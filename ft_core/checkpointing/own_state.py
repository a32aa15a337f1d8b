"""A receiver's own state, as a measure for a donor's: which classes it may hold, and how large it may be.

The state that is received has the receiver's own shape, or grew out of it: optimizers make theirs in the first step.
So its own size bounds what a donor may claim, before memory is planned for the claim, and its own classes are those
that a received state may hold (besides the registered ones).

Threads: pure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ft_core.checkpointing.state_encoding import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

GROWTH_MAX: Final = 16
"""How many times its own size a receiver believes: optimizer state is made in the first step (AdamW: 2 tensors per
parameter), averages and histories come with time."""
SLACK_BYTES: Final = 1 << 30
LEAVES_MAX: Final = 1 << 20
LEAVES_SLACK: Final = 1 << 14
MANIFEST_BYTES_MAX: Final = 256 << 20
MANIFEST_SLACK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest state a receiver believes: bytes of its tensors, their number, bytes of the manifest, and why."""

    nbytes: int
    leaves: int
    manifest_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class OwnState:
    """Measures of a state, and the user's classes in it by the name they travel under."""

    nbytes: int
    leaves: int
    skeleton_bytes: int
    classes: Mapping[str, type] = field(default_factory=dict)

    @classmethod
    def of(cls, state: object) -> OwnState:
        """Look at `state` without copying any of it. Raises `EncodingError` with the key path of what cannot travel."""
        found = encode(state, dry=True)
        return cls(
            nbytes=sum(leaf.nbytes for leaf in found.leaves),
            leaves=len(found.leaves),
            skeleton_bytes=len(found.skeleton_bytes()) + sum(len(leaf.path) + 64 for leaf in found.leaves),
            classes={name: kind for name, (kind, _) in found.classes.items()},
        )


def limit_for(own: OwnState | None) -> Limit:
    """What to believe of a donor; without an own state: what could fit into this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if own is None:
        return Limit(memory, LEAVES_MAX, MANIFEST_BYTES_MAX, "that is this machine's memory")
    grown = GROWTH_MAX * own.nbytes + SLACK_BYTES
    return Limit(
        min(memory, grown),
        min(LEAVES_MAX, GROWTH_MAX * own.leaves + LEAVES_SLACK),
        min(MANIFEST_BYTES_MAX, GROWTH_MAX * own.skeleton_bytes + MANIFEST_SLACK_BYTES),
        f"{GROWTH_MAX} times its own {own.nbytes} bytes, and {SLACK_BYTES}; is the script the same on both?"
        if grown <= memory
        else "that is this machine's memory",
    )
