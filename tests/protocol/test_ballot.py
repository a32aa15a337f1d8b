"""The fence's format: exact in float32 whatever the order of the sum, and everything that goes in comes out."""

from __future__ import annotations

import random
import struct
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.protocol.rank.ballot import (
    BITS,
    COUNTS,
    DIGIT,
    FENCE_SLOTS,
    MAX_MEMBERS,
    MAX_WEIGHT,
    SHARES,
    FenceInput,
    FenceSum,
    bitmap_of,
    decode,
    encode,
    pieces_of,
    places_missing,
    tag_of,
)
from ft_core.settings import MAX_REPLICAS

NO_FLAGS = {"tag", "weight", "share_of", "sample", "tolerates"}
FLAGS = [field.name for field in fields(FenceInput) if field.name not in NO_FLAGS]
INPUTS = st.builds(
    FenceInput, tag=st.just(7), weight=st.integers(0, MAX_WEIGHT), share_of=st.integers(-1, 0),
    sample=st.none() | st.sampled_from([0, 1, 256, 0xFFFF_FFFF]), tolerates=st.integers(0, 9).map(lambda n: n == 0),
    **{name: st.booleans() for name in FLAGS},
)  # fmt: skip


def float32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def summed(rows: list[list[float]], rng: random.Random) -> list[float]:
    """As a ring or a tree does: float32, two partial sums at a time, in any order."""
    rows = [list(row) for row in rows]
    while len(rows) > 1:
        a, b = rows.pop(rng.randrange(len(rows))), rows.pop(rng.randrange(len(rows)))
        rows.append([float32(float32(x) + float32(y)) for x, y in zip(a, b, strict=True)])
    return rows[0]


@settings(deadline=None)
@given(st.lists(INPUTS, min_size=1, max_size=40), st.integers(0, 99))
def test_a_sum_says_how_many_said_what(members: list[FenceInput], seed: int) -> None:
    for rank, said in enumerate(members):
        said.share_of = rank if said.share_of == 0 else -1
    told = decode(summed([encode(said) for said in members], random.Random(seed)), len(members))
    count = {name: sum(getattr(said, name) for said in members) for name in FLAGS}
    assert told == FenceSum(
        members=len(members), tags=[len(members) * 7, 0, 0, 0, 0], weight=sum(said.weight for said in members),
        contributed=sum(said.weight > 0 for said in members),
        shares=bitmap_of(tuple(rank for rank, said in enumerate(members) if said.share_of >= 0)),
        failed=count["failed"], change=count["change"], no_lease=count["no_lease"], out=count["out"],
        trailing=count["trails"], ready=count["ready"], stop=count["stop"], ends=count["ends"],
        sources_lost=count["source_lost"], lagging=count["lags"], passed=count["passed"],
        states_differ=not any(said.tolerates for said in members)
        and len({said.sample for said in members} - {None}) > 1,
    )  # fmt: skip
    assert told.is_of(len(members), 7)
    assert not told.is_of(len(members) + 1, 7)
    assert not told.is_of(len(members), 8)


def test_the_largest_fence_is_exact() -> None:
    """R0: as many members as a quorum holds, everything at its maximum, several orders of summation."""
    assert MAX_MEMBERS == MAX_REPLICAS == 1024
    assert MAX_MEMBERS * (DIGIT - 1) < 1 << 24
    tag = (1 << 64) - 1
    flags: dict[str, Any] = dict.fromkeys(FLAGS, True)
    flags |= {"sample": 0xFFFF_FFFF, "tolerates": True}
    rows = [encode(FenceInput(tag, MAX_WEIGHT, rank, **flags)) for rank in range(MAX_MEMBERS)]
    for row in rows:
        assert len(row) == FENCE_SLOTS
        assert all(x == int(x) and 0 <= x < DIGIT for x in row[:SHARES])
        assert all(x == int(x) and 0 <= x < 1 << BITS for x in row[SHARES:])
    for seed in range(3):
        sums = summed(rows, random.Random(seed))
        assert all(x < 1 << 24 for x in sums)
        told = decode(sums, MAX_MEMBERS)
        assert told.is_of(MAX_MEMBERS, tag)
        assert (told.weight, told.shares) == (MAX_MEMBERS * MAX_WEIGHT, (1 << MAX_MEMBERS) - 1)
        assert {told.out, told.trailing, told.lagging, told.passed, told.contributed} == {MAX_MEMBERS}
    assert MAX_MEMBERS < COUNTS


@settings(deadline=None, max_examples=25)
@given(st.integers(41, MAX_MEMBERS), st.randoms(use_true_random=False))
def test_a_large_quorum_sums_as_a_small_one(members: int, rng: random.Random) -> None:
    """Weights, shares, flags and a digest that one member has in another way, with as many members as there may be."""
    tag, sample = rng.getrandbits(64), rng.getrandbits(32)
    weights = [rng.choice((0, 1, 70_000, MAX_WEIGHT)) for _ in range(members)]
    shares = {rank for rank in range(members) if rng.random() < 0.9}
    odd = rng.randrange(members) if rng.random() < 0.5 else -1
    failed = {rank for rank in range(members) if rng.random() < 0.1}
    rows = [
        encode(
            FenceInput(
                tag, weight, rank if rank in shares else -1, failed=rank in failed,
                sample=sample ^ (1 << rng.randrange(32)) if rank == odd else sample,
            )
        )
        for rank, weight in enumerate(weights)
    ]  # fmt: skip
    told = decode(summed(rows, rng), members)
    assert told.is_of(members, tag)
    assert not told.is_of(members, tag ^ 1)
    assert (told.weight, told.failed) == (sum(weights), len(failed))
    assert told.shares == bitmap_of(tuple(sorted(shares)))
    assert told.states_differ == (odd >= 0)


def test_a_small_quorum_reads_what_it_needs_of_the_bitmap() -> None:
    """What a quorum of up to 256 sends and reads has not grown with the largest that there may be."""
    assert SHARES - (-256 // BITS) <= 41
    for members in (1, 24, 25, 256, MAX_MEMBERS):
        row = encode(FenceInput(3, share_of=members - 1))
        row[SHARES - (-members // BITS) :] = [float("nan")] * (FENCE_SLOTS - SHARES + (-members // BITS))
        assert decode(row, members).shares == 1 << (members - 1)


def test_what_is_no_number_agrees_with_nobody() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not decode([bad] * FENCE_SLOTS, 3).is_of(3, 0)
        assert not decode([0.0] * (FENCE_SLOTS - 1) + [bad], MAX_MEMBERS).is_of(MAX_MEMBERS, 0)


@given(st.sets(st.integers(0, MAX_MEMBERS - 1), min_size=1), st.sets(st.integers(0, MAX_MEMBERS - 1)))
def test_whose_share_is_missing(ranks: set[int], there: set[int]) -> None:
    ordered = tuple(sorted(ranks))
    missing = places_missing(ordered, bitmap_of(tuple(there)))
    assert {ordered[place] for place in missing} == ranks - there
    assert list(missing) == sorted(missing)


def test_a_tag_is_a_function_of_every_number_and_its_place() -> None:
    tags = {tag_of(1, 2, 3), tag_of(1, 3, 2), tag_of(1, 2, 4), tag_of(-1, 2, 3), tag_of(1, 2)}
    assert len(tags) == 5
    assert all(sum(piece << 14 * place for place, piece in enumerate(pieces_of(tag))) == tag for tag in tags)


@pytest.mark.parametrize("members", [2, 3, 255, 256, MAX_MEMBERS])
def test_one_member_that_differs_by_one_bit_is_seen(members: int) -> None:
    """Also where the others' mean is what it has, and in sums that float32 makes."""
    same = [encode(FenceInput(1, sample=0xFFFF_FFFF))] * members
    for bit in range(32):
        another = encode(FenceInput(1, sample=0xFFFF_FFFF ^ (1 << bit)))
        assert decode(summed([*same[:-1], another], random.Random(bit)), members).states_differ
    assert not decode(summed(same, random.Random(0)), members).states_differ
