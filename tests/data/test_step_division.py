"""Cursor and division: every position in exactly one share, whatever was committed, returned or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.data.cursor import Cursor, merged, part, size_of
from ft_core.data.scaling import learning_rate_factor
from ft_core.data.step_division import Batching, StepPlan, plan_step
from ft_core.errors import ConfigError


def positions(ranges: Any) -> list[int]:
    return [p for start, stop in ranges for p in range(start, stop)]


@st.composite
def batchings(draw: Any) -> Batching:
    size = draw(st.integers(1, 6))
    if draw(st.booleans()):
        return Batching(size, draw(st.integers(1, 30)), fixed_micro_batches=draw(st.booleans()))
    return Batching(size, accumulation_steps=draw(st.integers(1, 3)))


@st.composite
def cursors(draw: Any) -> Cursor:
    length = draw(st.integers(1, 60))
    taken = draw(st.integers(0, length))
    edges = sorted(draw(st.lists(st.integers(0, taken), max_size=8, unique=True)))
    returned = tuple(zip(edges[::2], edges[1::2], strict=False))
    cursor = Cursor(length, 2, taken, returned, 1)
    return cursor if cursor.left else Cursor(length, 3)


@given(cursors(), batchings(), st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_a_step_is_divided_without_rest_and_overlap(cursor: Cursor, batching: Batching, readers: int) -> None:
    plan = plan_step(cursor, batching, readers)
    assert plan.samples == min(cursor.left, batching.step_size(readers)) >= 1
    dealt: list[int] = []
    shares = []
    for reader in range(readers):
        micro_batches = plan.of(reader)
        assert [m.last for m in micro_batches] == [False] * (len(micro_batches) - 1) + [True]
        assert all(1 <= m.size <= batching.batch_size for m in micro_batches)
        shares.append(sum(m.weight for m in micro_batches))
        assert [m.weight for m in micro_batches] == [m.size if shares[-1] else 0 for m in micro_batches]
        if shares[-1]:
            dealt += [p for m in micro_batches for p in positions(m.ranges)]
        else:
            assert len(micro_batches) == 1  # a filler
    assert dealt == positions(cursor.ahead(plan.samples))
    # With fixed micro-batches one more of them, and the last of the step may be short.
    assert max(shares) - min(shares) <= (2 * batching.batch_size - 1 if batching.fixed_micro_batches else 1)
    assert len(plan.of(0)) <= max(1, batching.micro_steps(readers))
    assert plan.of(None)[0].weight == 0


@given(cursors(), batchings(), st.integers(1, 5), st.data())
@settings(max_examples=300, deadline=None)
def test_a_commit_takes_what_its_contributors_read(
    cursor: Cursor, batching: Batching, readers: int, data: st.DataObject
) -> None:
    assert cursor.sound
    contributed = data.draw(st.sets(st.integers(0, readers - 1)))
    plan = plan_step(cursor, batching, readers)
    left = set(positions(cursor.returned)) | set(range(cursor.taken, cursor.length))
    for reader in contributed:
        left -= {p for m in plan.of(reader) if m.weight for p in positions(m.ranges)}
    after = plan.after(contributed)
    assert after.sound
    if not left:
        assert after == Cursor(cursor.length, cursor.epoch + 1)
    else:
        assert after.epoch == cursor.epoch
        assert set(positions(after.returned)) | set(range(after.taken, after.length)) == left
        assert after.left == len(left)
    assert plan.after(None) == plan.after(set(range(readers)))


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 30), st.data())
@settings(max_examples=100, deadline=None)
def test_fixed_micro_batches_do_not_depend_on_the_membership(
    length: int, size: int, total: int, data: st.DataObject
) -> None:
    batching = Batching(size, total, fixed_micro_batches=True)
    cursor = Cursor(length, taken=data.draw(st.integers(0, length - 1)))

    def cuts(readers: int) -> list[tuple[int, Any]]:
        plan = StepPlan(cursor, batching, readers)
        dealt = [m for reader in range(readers) for m in plan.of(reader) if m.weight]
        return [(m.number, m.ranges) for m in dealt]

    alone = cuts(1)
    assert [number for number, _ in alone] == list(range(len(alone)))
    assert cuts(data.draw(st.integers(2, 9))) == alone


@given(st.integers(1, 300), batchings(), st.integers(1, 5), st.data())
@settings(max_examples=100, deadline=None)
def test_the_length_of_an_epoch(length: int, batching: Batching, readers: int, data: st.DataObject) -> None:
    reader = data.draw(st.integers(0, readers - 1))
    cursor, batches = Cursor(length), 0
    while cursor.epoch == 0:
        plan = plan_step(cursor, batching, readers)
        batches += len(plan.of(reader))
        cursor = plan.after()
    assert batching.epoch_batches(length, readers, reader) == batches


def test_a_constant_global_batch_whatever_the_membership() -> None:
    batching = Batching(batch_size=8, global_batch_size=64)
    assert [batching.micro_steps(readers) for readers in (1, 2, 3, 4, 8, 9)] == [8, 4, 3, 2, 1, 1]
    for readers in range(1, 12):
        plan = plan_step(Cursor(1000), batching, readers)
        assert sum(m.weight for reader in range(readers) for m in plan.of(reader)) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"batch_size": -3}, "batch_size=-3"),
        ({"batch_size": 2.0}, "batch_size must be an int, got 2.0"),
        ({"batch_size": True}, "batch_size must be an int, got True"),
        ({"batch_size": 4, "global_batch_size": 0}, "global_batch_size=0"),
        ({"batch_size": 4, "accumulation_steps": 0}, "accumulation_steps=0"),
        ({"batch_size": 4, "accumulation_steps": 2, "global_batch_size": 8}, "leave accumulation_steps out"),
        ({"batch_size": 4, "fixed_micro_batches": True}, "needs global_batch_size"),
        ({"batch_size": 4, "max_micro_steps": 2}, "max_micro_steps is for global_batch_size"),
        (
            {"batch_size": 4, "global_batch_size": 64, "max_micro_steps": 4},
            "global_batch_size=64 cannot be divided among 1 reader: with batch_size=4 .* need 16 micro-steps",
        ),
        (
            {"batch_size": 4, "global_batch_size": 64, "max_micro_steps": 4, "min_readers": 3},
            "among 3 readers: .* 6 micro-steps",
        ),
    ],
)
def test_batchings_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batching(**arguments)


def test_too_few_readers_for_the_global_batch() -> None:
    batching = Batching(4, 64, max_micro_steps=4, min_readers=4)
    assert plan_step(Cursor(100), batching, 4).samples == 64
    with pytest.raises(ConfigError, match="cannot be divided among 3 readers"):
        plan_step(Cursor(100), batching, 3)


def test_learning_rates_follow_the_batch_only_by_name() -> None:
    assert learning_rate_factor(64, 256, "linear") == 0.25
    assert learning_rate_factor(64, 256, "sqrt") == 0.5
    for arguments in ((64, 256, "none"), (0, 256, "linear"), (64, 0, "sqrt")):
        with pytest.raises(ConfigError):
            learning_rate_factor(*arguments)


def test_ranges() -> None:
    assert merged([(5, 7), (0, 2), (2, 4)]) == ((0, 4), (5, 7))
    assert part(((0, 4), (6, 9)), 2, 6) == ((2, 4), (6, 8))
    assert part(((0, 4),), 4, 4) == ()
    assert size_of(((0, 4), (6, 9))) == 7
