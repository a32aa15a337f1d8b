"""`SegmentPool`: what is kept, what is given back, and the other process's view of it."""

from __future__ import annotations

import os

import pytest

from ft_core.errors import ThisMachineError
from ft_core.process_group.baby import segments
from ft_core.process_group.baby.segments import MIN_BYTES, SegmentPool, SegmentViews


def test_a_freed_segment_serves_the_next_collective_of_its_size() -> None:
    pool = SegmentPool()
    first = pool.take(MIN_BYTES + 1)
    assert first.size_bytes == 2 * MIN_BYTES
    second = pool.take(MIN_BYTES + 1)
    assert second.number != first.number
    pool.give_back(first)
    assert pool.take(3) is not first
    assert pool.take(2 * MIN_BYTES) is first
    assert repr(pool) == "SegmentPool(0 idle, 0 bytes)"
    for segment in (first, second):
        pool.give_back(segment)
    pool.close()
    assert first.fd == second.fd == -1


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_IDLE_BYTES", 4 * MIN_BYTES)
    monkeypatch.setattr(segments, "MAX_IDLE_SEGMENTS", 4)
    pool = SegmentPool()
    taken = [pool.take(MIN_BYTES) for _ in range(6)]
    large = pool.take(2 * MIN_BYTES)
    known = {segment.number for segment in (*taken, large)}
    for segment in taken:
        pool.give_back(segment)
    assert pool.idle_bytes == 4 * MIN_BYTES
    pool.give_back(large)
    assert pool.idle_bytes == 4 * MIN_BYTES  # fewer segments than are allowed, as many bytes
    gone = [segment.number for segment in taken[:4]]
    assert sorted(pool.gone(known)) == sorted(gone)
    assert pool.gone(known) == []
    assert [segment.fd for segment in taken[:4]] == [-1] * 4
    pool.close()


def test_what_may_still_be_written_to_is_not_used_again() -> None:
    pool = SegmentPool()
    segment = pool.take(1)
    pool.drop(segment)
    assert pool.gone({segment.number}) == [segment.number]
    assert pool.take(1) is not segment


def test_both_sides_see_the_same_memory() -> None:
    pool, views = SegmentPool(), SegmentViews()
    segment = pool.take(1)
    views.add(segment.number, os.dup(segment.fd), segment.size_bytes)
    segment.memory[5] = 7
    assert views[segment.number][5] == 7
    views[segment.number][6] = 8
    assert segment.memory[6] == 8
    views.forget(segment.number)
    assert repr(views) == "SegmentViews(0)"
    pool.give_back(segment)
    pool.close()


def test_without_memory_it_is_this_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(ThisMachineError, match="no shared memory of 65536 bytes"):
        SegmentPool().take(1)
