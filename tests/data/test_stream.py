"""Streams by position."""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING

import pytest

from ft_core.data import ElasticDataLoader, ReplayedStream
from ft_core.errors import ConfigError, UsageError
from tests.data.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Iterator


class Squares:
    """A reproducible source that can only skip."""

    def __init__(self, end: int | None = None) -> None:
        self.end = end
        self.opened: list[int] = []

    def __call__(self, position: int) -> Iterator[int]:
        self.opened.append(position)
        numbers = itertools.count(position) if self.end is None else range(position, self.end)
        return (n * n for n in numbers)


def test_reads_forward_skips_and_opens_anew() -> None:
    source = Squares()
    stream = ReplayedStream(source, max_skip=3)
    assert stream.read([0, 1]) == [0, 1]
    assert stream.read([4, 5]) == [16, 25]
    assert source.opened == [0]
    assert stream.read([1]) == [1]
    assert stream[9] == 81
    assert source.opened == [0, 1, 9]
    assert repr(stream) == "ReplayedStream(length=None, at position 10)"


def test_an_open_iterator_is_not_pickled() -> None:
    stream = ReplayedStream(Squares(), length=5)
    assert stream.read([2]) == [4]
    assert pickle.loads(pickle.dumps(stream)).read([3]) == [9]


@pytest.mark.parametrize("length", [None, 8])
def test_a_stream_shorter_than_said(length: int | None) -> None:
    stream = ReplayedStream(Squares(end=5), length=length)
    with pytest.raises(UsageError, match=r"ended before position 6, and was said to have (no end|length=8)"):
        stream.read([6])
    assert stream.read([4]) == [16]


def test_arguments_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="length=0"):
        ReplayedStream(Squares(), length=0)
    with pytest.raises(ConfigError, match="max_skip=-1"):
        ReplayedStream(Squares(), max_skip=-1)


def test_a_stream_without_end_goes_on_from_epoch_to_epoch() -> None:
    manager = Membership(groups=2, place=1)
    loader = ElasticDataLoader(ReplayedStream(Squares()), 2, manager=manager, samples_per_epoch=6)
    seen = []
    for _ in loader.epochs(2):
        for batch in loader:
            seen.append(batch.tolist())
            manager.vote()
    assert seen == [[4, 9], [25], [64, 81], [121]]


def test_a_stream_with_an_end_is_read_again_in_each_epoch() -> None:
    manager = Membership()
    loader = ElasticDataLoader(ReplayedStream(Squares(end=3), length=3), 2, manager=manager)
    seen = []
    for _ in loader.epochs(2):
        for batch in loader:
            seen.append(batch.tolist())
            manager.vote()
    assert seen == [[0, 1], [4]] * 2
