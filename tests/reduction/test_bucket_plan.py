"""The plan: pure, equal in every process, and every gradient in it exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.reduction.bucket_plan import (
    SHARD_ALIGNMENT,
    WEIGHT_DIGITS,
    BucketSettings,
    ShardedPlan,
    TensorSpec,
    plan_buckets,
    plan_inside,
)

FENCE = 16
SIZES = {"float32": 4, "bfloat16": 2, "float64": 8, "int64": 8, "complex64": 8, "bool": 1}


def spec(name: str, *shape: int, dtype: str = "float32", device: int = 0, trained: bool = True) -> TensorSpec:
    return TensorSpec(name, dtype, shape, SIZES[dtype], device=device, trained=trained)


def caps(*sizes_bytes: int, **kwargs: bool) -> BucketSettings:
    return BucketSettings(caps_bytes=sizes_bytes, **kwargs)


def test_small_models_have_one_bucket_with_the_tail_at_its_end() -> None:
    plan = plan_buckets([spec("w", 4, 5), spec("b", 4)], [], BucketSettings(), FENCE)
    (bucket,) = plan.buckets
    assert [(m.parameter, m.offset, m.numel) for m in bucket.members] == [(1, 0, 4), (0, 4, 20)]
    assert (bucket.gradients, bucket.numel) == (24, 24 + FENCE)
    assert (plan.tail.fence, plan.tail.end) == (24, 40)


def test_a_bucket_is_closed_by_the_parameter_that_reaches_its_cap() -> None:
    plan = plan_buckets([spec(str(i), 4) for i in range(5)], [], caps(16, 32), FENCE)
    assert [[m.parameter for m in b.members] for b in plan.buckets] == [[4], [3, 2], [1, 0]]


def test_dtypes_and_devices_do_not_mix_and_the_last_complete_bucket_is_last() -> None:
    parameters = [spec("a", 2), spec("b", 2, dtype="bfloat16"), spec("c", 2), spec("d", 2, device=1)]
    plan = plan_buckets(parameters, [], BucketSettings(), FENCE)
    assert [(b.dtype, b.device, [m.parameter for m in b.members]) for b in plan.buckets] == [
        ("float32", 1, [3]),
        ("bfloat16", 0, [1]),
        ("float32", 0, [2, 0]),
    ]


def test_a_tail_that_finds_no_float32_bucket_at_the_end_gets_its_own() -> None:
    plan = plan_buckets([spec("a", 2, dtype="bfloat16"), spec("b", 2)], [], BucketSettings(), FENCE)
    assert [(b.dtype, b.gradients, b.numel) for b in plan.buckets] == [
        ("float32", 2, 2),
        ("bfloat16", 2, 2),
        ("float32", 0, FENCE),
    ]


def test_complex_gradients_travel_as_pairs() -> None:
    plan = plan_buckets([spec("a", 3, dtype="complex64")], [], BucketSettings(), FENCE)
    assert (plan.buckets[0].dtype, plan.buckets[0].gradients) == ("float32", 6)


def test_the_tail_has_room_for_used_bits_and_buffers() -> None:
    buffers = [spec("mean", 3), spec("count", dtype="int64"), spec("mask", 5, dtype="bool"), spec("var", 3)]
    plan = plan_buckets([spec("a", 2), spec("b", 2)], buffers, BucketSettings(find_unused=True), FENCE)
    tail = plan.tail
    assert (tail.fence, tail.used, tail.used_numel) == (4, 20, 2)
    assert tail.buffers == ((0, 22), (3, 25))
    assert (tail.pieces, tail.pieces_numel, tail.staged, tail.end) == (28, 16, ((1, 0), (2, 16)), 44)
    without = plan_buckets([spec("a", 2), spec("b", 2)], buffers, BucketSettings(broadcast_buffers=False), FENCE)
    assert without.tail.end == 4 + FENCE
    assert without.buffers == ()


def test_frozen_parameters_are_described_and_not_planned() -> None:
    plan = plan_buckets([spec("a", 2, trained=False), spec("b", 2)], [], BucketSettings(), FENCE)
    assert plan.describe()[:2] == ["a float32 [2] frozen", "b float32 [2]"]
    assert [m.parameter for b in plan.buckets for m in b.members] == [0]
    assert plan.trained[0].name == "b"
    assert (plan.names, plan.shapes, plan.dtypes) == (["a", "b"], [(2,), (2,)], ["float32", "float32"])


BASE = [spec("a", 2, 3), spec("b", 2)]


@pytest.mark.parametrize(
    "other",
    [
        [spec("a", 3, 2), BASE[1]],
        [spec("x", 2, 3), BASE[1]],
        [spec("a", 2, 3, dtype="bfloat16"), BASE[1]],
        [spec("a", 2, 3, trained=False), BASE[1]],
        [replace(BASE[0], strides=(1, 2)), BASE[1]],
        [BASE[1], BASE[0]],
        [BASE[0]],
    ],
    ids=["shape", "name", "dtype", "frozen", "strides", "order", "missing"],
)
def test_the_digest_sees_every_difference(other: list[TensorSpec]) -> None:
    one, two = (plan_buckets(p, [], BucketSettings(), FENCE) for p in (BASE, other))
    assert one.digest != two.digest
    assert one.describe() != two.describe()


def test_the_digest_sees_settings_and_buffers() -> None:
    plans = [
        plan_buckets(BASE, [], BucketSettings(), FENCE),
        plan_buckets(BASE, [], caps(4), FENCE),
        plan_buckets(BASE, [], BucketSettings(find_unused=True), FENCE),
        plan_buckets(BASE, [spec("mean", 2)], BucketSettings(), FENCE),
        plan_buckets(BASE, [], BucketSettings(), FENCE + 1),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert all(0 <= plan.digest < 1 << 64 for plan in plans)


DIGEST_SCRIPT = """
from ft_core.reduction.bucket_plan import BucketSettings, TensorSpec, plan_buckets
parameters = [TensorSpec("a", "float32", (2, 3), 4), TensorSpec("b", "bfloat16", (2,), 2, device=1)]
buffers = [TensorSpec("mean", "float32", (2,), 4)]
plan = plan_buckets(parameters, buffers, BucketSettings(), 16)
print(plan.digest, end="")
"""


def test_the_digest_is_equal_in_another_process() -> None:
    def digest(seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-c", DIGEST_SCRIPT], env=environment, capture_output=True, check=True, timeout=60
        ).stdout

    assert digest("1") == digest("2") != b""


tensors = st.builds(
    lambda shape, dtype, device, trained: spec("p", *shape, dtype=dtype, device=device, trained=trained),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(["float32", "bfloat16", "float64", "complex64"]),
    st.integers(0, 1),
    st.booleans(),
)


@given(
    st.lists(tensors, max_size=12),
    st.lists(
        st.builds(lambda n, d: spec("b", n, dtype=d), st.integers(0, 9), st.sampled_from(list(SIZES))), max_size=5
    ),
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
    st.booleans(),
)
def test_everything_is_planned_once_without_overlap(
    parameters: list[TensorSpec], buffers: list[TensorSpec], caps_bytes: list[int], find_unused: bool
) -> None:
    plan = plan_buckets(parameters, buffers, caps(*caps_bytes, find_unused=find_unused), FENCE)
    planned = sorted(m.parameter for b in plan.buckets for m in b.members)
    assert planned == list(range(len(plan.trained)))
    for bucket in plan.buckets:
        end = 0
        for member in bucket.members:
            assert member.offset == end
            end += member.numel
        assert end == bucket.gradients
    *_, last = plan.buckets
    assert last.dtype == "float32"
    tail = plan.tail
    assert tail.fence == last.gradients
    assert tail.used == tail.fence + FENCE
    assert tail.pieces == tail.used + tail.used_numel + sum(b.numel for b in buffers if b.dtype == "float32")
    assert tail.end == tail.pieces + tail.pieces_numel == last.numel
    assert [index for index, _ in tail.buffers + tail.staged] == sorted(
        range(len(buffers)), key=lambda i: (buffers[i].dtype != "float32", i)
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_plan_in_shards(ranks: int) -> None:
    """The same gradients in equal parts; fence and buffers follow the last shard; nobody else can train with it."""
    parameters = [spec("a", 7, 5), spec("b", 9, dtype="bfloat16"), spec("c", 11)]
    buffers = [spec("running", 6), spec("count", 1, dtype="int64")]
    whole = plan_buckets(parameters, buffers, caps(16, find_unused=True), FENCE)
    plan = ShardedPlan(whole.parameters, whole.buffers, whole.settings, whole.buckets, whole.tail, ranks)
    assert len({whole.digest, plan.digest, replace(plan, ranks=5).digest}) == 3
    plans = plan_inside(plan)
    for bucket, summed, crossing in zip(whole.buckets, plans.summed.buckets, plans.crossing.buckets, strict=True):
        assert (summed.members, summed.gradients) == (bucket.members, bucket.gradients)
        assert summed.numel == ranks * crossing.gradients >= bucket.gradients
        assert summed.numel < bucket.gradients + 3 + WEIGHT_DIGITS + ranks * SHARD_ALIGNMENT
    tail, beside, last = plans.summed.tail, plans.crossing.tail, plans.crossing.buckets[-1]
    assert (tail.used, tail.used_numel, tail.end - tail.pieces) == (whole.buckets[-1].gradients, 3, WEIGHT_DIGITS)
    assert tail.end <= plans.summed.buckets[-1].numel
    assert (beside.fence, beside.fence_slots, beside.used_numel) == (last.gradients, FENCE, 0)
    assert (beside.buffers[0][1], beside.end) == (last.gradients + FENCE, last.numel)
    assert last.numel - last.gradients == FENCE + 6 + whole.tail.pieces_numel
