"""Which donor and which receiver form a process group of two. Pure; every member of a quorum computes the same.

A group of its own for each pair, and not one for all that give or receive: who dies, or does not come, costs its pair
and nobody else. A receiver pairs with the first of its donors, as many as DONORS_MAX, and takes from all of them at
once; donors come rotated by its place among those that heal, as in the heal plan, so donors get about equally many.

Invariants: no donor is in more than RECEIVERS_MAX pairs. Where that leaves no pair for a receiver, it has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DONORS_MAX: Final = 2
"""Pairs of one receiver."""
RECEIVERS_MAX: Final = 8
"""Pairs of one donor: each costs it a thread, connections, and a share of what it can send."""


def pairs(holders: Sequence[int], healing: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each receiver the donors that it forms a pair with, preferred first. Both in the heal plan's order."""
    taken = dict.fromkeys(holders, 0)
    found: dict[int, tuple[int, ...]] = dict.fromkeys(healing, ())
    for choice in range(min(DONORS_MAX, len(holders))):  # everybody's first donor before anybody's second
        for place, receiver in enumerate(healing):
            donor = holders[(place + choice) % len(holders)]
            if taken[donor] < RECEIVERS_MAX and len(found[receiver]) == choice:
                taken[donor] += 1
                found[receiver] += (donor,)
    return found
