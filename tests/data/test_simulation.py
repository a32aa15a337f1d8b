"""Exactly once over many seeds: deaths, vetoes, joins, late members, failed heals, split verdicts, prefetching."""

from __future__ import annotations

import functools

import pytest
import torch

from ft_core.data.cursor import Cursor
from ft_core.data.epoch_order import EpochOrder
from ft_core.data.sampler import ElasticSampler
from tests.data.ledger import Ledger
from tests.data.world import World

SEEDS = 1200


@pytest.fixture(autouse=True)
def shared_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas of all runs draw the same few orders: compute each once."""
    torch.set_num_threads(1)
    monkeypatch.setattr("ft_core.data.sampler.EpochOrder", functools.cache(EpochOrder))


def test_every_sample_of_an_epoch_is_committed_once() -> None:
    outcomes: dict[str, int] = {}
    for seed in range(SEEDS):
        world = World(seed)
        world.run()
        world.check()
        for name, count in world.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
    assert all(outcomes[name] > 100 for name in ("commit", "veto", "death", "split")), outcomes


def test_the_ledger_sees_what_is_lost_and_what_comes_twice() -> None:
    ledger = Ledger()
    ledger.commit(0, [0, 1, 1, 9])
    ledger.commit(2, [0])
    assert ledger.faults(1, 3) == [
        "epoch 0: lost [2]", "epoch 0: twice [1]", "epoch 0: foreign [9]", "samples of epochs [2]",
    ]  # fmt: skip


@pytest.mark.parametrize("broken", ["veto moves the cursor", "zeros count as samples"])
def test_the_simulation_would_see_it(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    real = ElasticSampler.committed

    def counts_everybody(self: ElasticSampler, contributed: object = None) -> None:
        real(self, None)

    def moves(self: ElasticSampler) -> None:
        assert self._open is not None
        self.cursor = self._open.plan.after()
        self._open = None

    if broken == "veto moves the cursor":
        monkeypatch.setattr(ElasticSampler, "vetoed", moves)
    else:
        monkeypatch.setattr(ElasticSampler, "committed", counts_everybody)
    failed = 0
    for seed in range(200):
        try:
            world = World(seed)
            world.run()
            world.check()
        except AssertionError:
            failed += 1
    assert failed > 5


def test_a_complete_epoch_is_the_beginning_of_the_next() -> None:
    assert Cursor(10, epoch=3, taken=8).after(5) == Cursor(10, epoch=4)
