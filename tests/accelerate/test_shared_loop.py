"""A shared evaluation loop without Accelerate: real Managers, state servers and connections, groups as threads."""

from __future__ import annotations

import random
import threading
from collections import namedtuple
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ft_accelerate.shared_loop import Padding, SharedLoop, joined
from ft_core.errors import UsageError
from ft_core.loop.shared_work import SharedWork
from tests.runtime.conftest import cluster, lighthouse, store
from tests.runtime.harness import Replica, crash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.runtime.harness import Action, Cluster

__all__ = ["cluster", "lighthouse", "store"]
AT = (3, "stepped")
PLACES = 3
"""Calls of gather_for_metrics in the loop's body."""


class Evaluator(Replica):
    """A replica that evaluates at some point of its run."""

    work: SharedWork


def ready(replica: Replica) -> None:
    assert isinstance(replica, Evaluator)
    replica.wrap()
    replica.work = SharedWork(replica.manager)
    replica.work.serve()


class Found:
    """What each replica saw, by name."""

    def __init__(self) -> None:
        self.returned: dict[str, list[list[int]]] = {}
        """Pieces whose results were returned, for each place in the body, in that order."""
        self.did: dict[str, list[int]] = {}
        """Pieces whose body ran."""
        self.empty: dict[str, int] = {}


def nothing(_: Replica) -> None:
    """No action."""


def evaluates(found: Found, pieces: int, at: Mapping[tuple[str, int, int], Action] | None = None) -> Action:
    """An action: one loop.

    Args:
        found: filled.
        pieces: of the data.
        at: what happens to whom before which result: (name, turns so far, place).
    """

    def act(replica: Replica) -> None:
        assert isinstance(replica, Evaluator)
        name = replica.name
        division = replica.work.divide("data", pieces)
        told = division.exchange("order", "same", 0.0, more=True)
        loop = SharedLoop(division, pieces, set(range(division.parts)) - set(told) - {division.part})
        returned = found.returned[name] = [[] for _ in range(PLACES)]
        did = found.did[name] = []
        found.empty[name] = 0
        while loop.agenda:
            piece = loop.begin()
            for place in range(PLACES):
                (at or {}).get((name, len(did), place), nothing)(replica)
                values = loop.result(torch.tensor([10 * piece + place]))
                found.empty[name] += not values
                returned[place] += [int(value) // 10 for value in values]
                assert all(int(value) % 10 == place for value in values)
            did.append(piece)

    return act


def evaluators(count: int, action: Action) -> list[Evaluator]:
    return [Evaluator(i, at={AT: action}, setup=ready, steps=5) for i in range(count)]


def check(found: Found, pieces: int, survivors: int) -> None:
    """Each of those who got through has every piece once, in order."""
    whole = [name for name, returned in found.returned.items() if all(r == list(range(pieces)) for r in returned)]
    assert len(whole) == survivors, found.returned


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 8, 9])
def test_each_does_its_share_and_has_everything_in_order(cluster: Cluster, pieces: int) -> None:
    found = Found()
    cluster.run(*evaluators(3, evaluates(found, pieces)))
    cluster.check(steps=5)
    check(found, pieces, 3)
    assert {len(did) for did in found.did.values()} == {-(-pieces // 3)}
    assert sorted({piece for did in found.did.values() for piece in did}) == list(range(pieces))
    assert set(found.empty.values()) == {0}


@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_at_whatever_place_is_made_up_for(cluster: Cluster, seed: int) -> None:
    """One or two of three, each before any of its results: the rest have every piece once, in order.

    Where a loss shows, a call returns nothing; once for each place.
    """
    dice, found, pieces = random.Random(seed), Found(), 20
    dead = dice.sample(range(3), 1 + seed % 2)
    at = {(f"r{i}", dice.randrange(3), dice.randrange(PLACES)): crash for i in dead}
    cluster.run(*evaluators(3, evaluates(found, pieces, at)))
    cluster.check(steps=5, survivors=3 - len(dead))
    check(found, pieces, 3 - len(dead))
    assert all(found.empty[f"r{i}"] <= PLACES * len(dead) for i in range(3) if i not in dead), (found.did, found.empty)


@pytest.mark.parametrize("dead", range(3))
def test_whose_loss_is_known_before_costs_no_call_its_result(cluster: Cluster, dead: int) -> None:
    """Whatever its place in the order: a mean per call would be no number where nothing is returned."""
    found = Found()
    act = evaluates(found, 20)
    cluster.run(*[Evaluator(i, at={AT: crash if i == dead else act}, setup=ready, steps=5) for i in range(3)])
    cluster.check(steps=5, survivors=2)
    check(found, 20, 2)
    assert set(found.empty.values()) == {0}, found.did


def test_who_is_slow_at_one_piece_is_waited_for(cluster: Cluster) -> None:
    found, never = Found(), threading.Event()
    cluster.run(*evaluators(3, evaluates(found, 9, {("r1", 1, 1): lambda _: never.wait(0.4)})))
    cluster.check(steps=5)
    check(found, 9, 3)
    assert {len(did) for did in found.did.values()} == {3}


def test_a_member_that_evaluates_something_else_has_all_of_that(cluster: Cluster) -> None:
    found = Found()
    other = Evaluator(2, at={AT: evaluates(found, 5)}, setup=ready, steps=5)
    cluster.run(*evaluators(2, evaluates(found, 6)), other)
    cluster.check(steps=5)
    assert found.returned.pop("r2") == [list(range(5))] * PLACES
    check(found, 6, 2)


# ---------------------------------------------------------------- joining


def test_results_are_joined_as_their_structure_says() -> None:
    pair = namedtuple("pair", "loss ids")
    a, b = pair(torch.tensor(1.0), {"x": torch.ones(2, 3)}), pair(torch.tensor(2.0), {"x": torch.zeros(1, 3)})
    both = joined([a, b], a, ())
    assert type(both) is pair
    assert both.loss.tolist() == [1.0, 2.0]
    assert both.ids["x"].shape == (3, 3)
    none = joined([], a, ())
    assert (tuple(none.loss.shape), tuple(none.ids["x"].shape)) == ((0,), (0, 3))
    assert joined([["a"], ["b", "c"]], ["b", "c"], (), objects=True) == ["a", "b", "c"]
    assert joined([], ["b"], (), objects=True) == []
    assert joined([np.ones(2), np.zeros(1)], np.ones(2), (), objects=True).tolist() == [1, 1, 0]


def test_tensors_of_different_sizes_are_padded_as_the_body_said() -> None:
    short, long = torch.ones(1, 2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
    assert joined([short, long], long, [Padding(1, -100, False)]).tolist() == [[1, 1, -100], [1, 1, 1], [1, 1, 1]]
    assert joined([short, long], long, [Padding(-1, 0, True)]).tolist() == [[0, 1, 1], [1, 1, 1], [1, 1, 1]]
    with pytest.raises(UsageError, match=r"\(1, 2\) in one replica group, \(2, 3\) in .*pad_across_processes"):
        joined([short, long], long, ())
    with pytest.raises(UsageError, match="pad_across_processes"):
        joined([torch.ones(1), torch.ones(1, 1)], torch.ones(1), [Padding(1, 0, False)])
