"""The order of an epoch: a permutation, the same everywhere, without writing it out."""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.data.epoch_order import AHEAD, SMALL, EpochOrder


@given(
    st.integers(1, 2000) | st.sampled_from([SMALL, SMALL + 1, SMALL + 2]),
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**40),
)
@settings(max_examples=30, deadline=None)
def test_every_index_once(length: int, seed: int, epoch: int) -> None:
    order = EpochOrder(length, seed, epoch)
    assert sorted(order.indices([(0, length)])) == list(range(length))


@given(st.integers(1, 2**62), st.integers(0, 100), st.data())
@settings(max_examples=60, deadline=None)
def test_any_part_of_any_length(length: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    found = EpochOrder(length, seed, 0).at(torch.tensor(positions)).tolist()
    assert len(set(found)) == len(positions)
    assert all(0 <= index < length for index in found)


@given(st.sampled_from([1, 2, 100, SMALL, SMALL + 1]), st.integers(0, 3 * AHEAD), st.data())
@settings(max_examples=30, deadline=None)
def test_ranges_are_parts_of_the_whole(length: int, stride: int, data: st.DataObject) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, length), max_size=8)))
    ranges = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    order = EpochOrder(length, 5, 1)
    whole = order.at(torch.arange(length)).tolist()
    for _ in range(2):
        assert order.indices(ranges, stride) == [whole[p] for a, b in ranges for p in range(a, b)]
        later = [(a + stride, b + stride) for a, b in ranges if b + stride <= length]
        assert order.indices(later, stride) == [whole[p] for a, b in later for p in range(a, b)]
    assert EpochOrder(length, 5, 1, shuffle=False).indices(ranges) == [p for a, b in ranges for p in range(a, b)]


def test_the_same_on_every_machine_and_version() -> None:
    """Written down once; a change of these numbers makes running jobs that are upgraded repeat and lose samples."""
    assert EpochOrder(10, 0, 0).indices([(0, 10)]) == [1, 2, 9, 6, 7, 3, 0, 5, 4, 8]
    assert EpochOrder(SMALL, 7, 3).indices([(1000, 1004)]) == [160, 15678, 12047, 17532]
    assert EpochOrder(SMALL + 1, 7, 3).indices([(1000, 1004)]) == [614, 11983, 48117, 57241]
    assert EpochOrder(10**8, 1, 2).indices([(99_999_997, 10**8)]) == [51671960, 45643955, 7922739]


def test_epochs_seeds_and_lengths_have_orders_of_their_own() -> None:
    orders = [EpochOrder(n, s, e).indices([(0, 50)]) for n in (100, 101) for s in (0, 1, -1) for e in (0, 1, 10)]
    assert len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("length", [3, 4, 6])
def test_the_first_two_samples_are_any_pair_equally_often(length: int) -> None:
    """Chi-square over all ordered pairs, within five standard deviations."""
    torch.set_num_threads(1)
    pairs, runs = length * (length - 1), 900
    drawn = Counter(tuple(EpochOrder(length, 0, epoch).indices([(0, 2)])) for epoch in range(runs))
    expected = runs / pairs
    chi = sum((drawn[pair] - expected) ** 2 / expected for pair in itertools.permutations(range(length), 2))
    assert abs(chi - (pairs - 1)) < 5 * math.sqrt(2 * (pairs - 1))


def test_neighbours_do_not_stay_neighbours() -> None:
    order = EpochOrder(200_000, 0, 0).indices([(0, 20_000)])
    mean = sum(order) / len(order)
    assert abs(mean - 100_000) < 5 * 200_000 / math.sqrt(12 * 20_000)
    close = sum(abs(a - b) < 200 for a, b in itertools.pairwise(order))
    assert close < 100  # 40 expected


def test_a_hundred_million_indices_take_no_time_and_no_memory() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    assert len(EpochOrder(100_000_000, 0, 0).indices([(50_000_000, 50_000_064)])) == 64
    took_s, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert took_s < 1.0
    assert peak < 10e6
