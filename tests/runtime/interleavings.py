"""Interleavings that a test chooses: actions that meet others, or wait for what a replica does or knows.

An action stands at a point of a replica's step (see harness.py). What a death costs whom depends on where it meets the
others; so the dying one waits until they are there, or they stay there until they know of it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ft_core.protocol.rank.phases import Phase
from tests.runtime.harness import LIMIT_S, both

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.runtime.harness import Action, Replica


def together(count: int) -> Action:
    """Wait until `count` replicas are at it, in the same step."""
    barrier = threading.Barrier(count)
    return lambda _: barrier.wait(LIMIT_S)


def moves(until: Action) -> Action:
    """Do what `until` does, then compute for as long as it takes until the next quorum is there.

    Which that is has to be known before: a death that `until` waits for may bring it at once.
    """

    def act(replica: Replica) -> None:
        rank = replica.manager._runtime.rank
        before = rank.quorum_id
        until(replica)
        replica.cluster.lighthouse.wait_for(lambda: rank.quorum_id != before and not rank.forming)

    return act


def until_broken(replica: Replica) -> None:
    """Computes until it knows that it cannot follow its quorum."""
    replica.cluster.lighthouse.wait_for(lambda: replica.manager._runtime.rank.broken)


def launched(replica: Replica, step: int) -> bool:
    """It waits for the others in a collective of the attempt on this step."""
    rank = replica.manager._runtime.rank
    return rank.attempt.base.step == step and rank.phase is Phase.REDUCING


def once(condition: Callable[[Replica], bool], others: Sequence[Replica], *then: Action) -> Action:
    """When it holds for all these others, do the rest."""

    def wait(replica: Replica) -> None:
        replica.cluster.lighthouse.wait_for(lambda: all(condition(other) for other in others))

    return both(wait, *then)


def once_launched(others: Sequence[Replica], step: int, *then: Action) -> Action:
    """When all these others wait in a collective of the attempt on this step: each of them loses it."""
    return once(lambda other: launched(other, step), others, *then)


def once_held(others: Sequence[Replica], step: int, *then: Action) -> Action:
    """When all these others have committed this step."""
    return once(lambda other: other.manager.current_step() == step, others, *then)
