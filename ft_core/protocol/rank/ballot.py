"""The fence's format: what one member puts into it, and what the sum over all members says. Pure.

How it works. A fence is FENCE_SLOTS float32 numbers that are summed with the gradients. `encode` writes one member's
part, `decode` reads the sum. The slots hold the weight of its gradient and a 64-bit tag in digits, the number of
members, their flags (some slots carry two: the second one counts from COUNTS on), a digest of a part of the state, and
a bitmap of whose share of the step is in the sum, 24 members a slot. Of the bitmap only the slots of the quorum's
members are read, so a small quorum pays for the room of a large one with some bytes on the wire.

Of the digest each of five digits travels, and its square. All who sent one have the same digit if and only if their
number times the sum of the squares is the square of the sum (Cauchy and Schwarz), so everybody, also who sent none,
sees from the sums alone whether somebody differs.

Invariant (R0): the sum is exact in float32, in whatever order it is made. Outside of the bitmap every slot of every
member is an integer below 2**14, so for up to MAX_MEMBERS = 2**10 members every partial sum is an integer below 2**24,
and float32 holds all of these. In the bitmap each bit is set by one member only, the one of that replica_rank; so every
partial sum is an OR of bits, and below 2**24 as well. (Were two members to take themselves for the same rank, the count
and the tag would not be what they have to be, and nobody reads the bitmap.)
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MEMBERS = 1 << 10
DIGIT_BITS, SAMPLE_BITS = 14, 7
DIGIT = 1 << DIGIT_BITS
"""A slot of one member is below it: MAX_MEMBERS times that is 2**24."""
WEIGHT_DIGITS, TAG_DIGITS, SAMPLE_DIGITS = 3, 5, 5
"""Digits of a weight and a tag, DIGIT_BITS each; of a digest, SAMPLE_BITS each, so that a square is below DIGIT."""
(
    FAILED, CHANGE, NO_LEASE, EXHAUSTED, READY, STOP, COUNT, CONTRIBUTED, ENDS_AND_SOURCE, LAGS_AND_PASSED, HOLDERS,
) = range(11)  # fmt: skip
WEIGHT = HOLDERS + 1
TAG = WEIGHT + WEIGHT_DIGITS
SAMPLE = TAG + TAG_DIGITS
SQUARES = SAMPLE + SAMPLE_DIGITS
SHARES = SQUARES + SAMPLE_DIGITS
MAX_WEIGHT = (1 << 32) - 1
COUNTS = 1 << 11
"""Two flags in one slot: the second counts from here on."""
BITS = 24
"""Members in one slot of the bitmap, which takes all slots from SHARES on."""
FENCE_SLOTS = SHARES + -(-MAX_MEMBERS // BITS)


@dataclass(slots=True)
class FenceInput:
    """What one member says in a fence."""

    tag: int
    """64 bits over everything that has to be equal on all members (`tag_of`)."""
    weight: int = 0
    """Of its gradient in the sum, at most MAX_WEIGHT."""
    share_of: int = -1
    """Its replica_rank if its share of the step is in the sum (an empty one, too); -1: it is not."""
    failed: bool = False
    change: bool = False
    """It wants a new quorum after this attempt."""
    no_lease: bool = False
    out: bool = False
    """It is out of data, or adds nothing in this whole quorum."""
    trails: bool = False
    """It is out of data and applies no commits."""
    ready: bool = False
    """The heal that was planned for it is done."""
    stop: bool = False
    ends: bool = False
    """It ends the data pass for all."""
    source_lost: bool = False
    """It is the source of the buffers, and has none to give."""
    lags: bool = False
    """It does not hold the state the attempt builds on, and no heal is planned."""
    passed: bool = False
    """The last data pass ended at the state it holds."""
    sample: int | None = None
    """32-bit digest of a part of the state that the attempt builds on; None: it does not hold that."""
    tolerates: bool = False
    """States differ again and again, and it has given up healing them."""


@dataclass(slots=True)
class FenceSum:
    """What all members say together: each number counts the members with that flag."""

    members: int
    tags: list[int]
    """Sums of the tag's digits."""
    weight: int
    contributed: int
    """Members whose weight is not 0."""
    shares: int
    """Bitmap over replica_ranks: whose share of the step is in the sum."""
    failed: int
    change: int
    no_lease: int
    out: int
    trailing: int
    ready: int
    stop: int
    ends: int
    sources_lost: int
    lagging: int
    passed: int
    states_differ: bool
    """Members hold different states under the same version, and nobody tolerates it."""

    def is_of(self, members: int, tag: int) -> bool:
        """Every one of `members` was in the attempt of this tag."""
        return self.members == members and self.tags == [members * piece for piece in pieces_of(tag)]


def encode(said: FenceInput) -> list[float]:
    """One member's slots."""
    slots = [0.0] * FENCE_SLOTS
    weight, rank = said.weight, said.share_of
    slots[:SHARES] = (
        said.failed, said.change, said.no_lease, said.out + COUNTS * said.trails, said.ready, said.stop, 1, weight > 0,
        said.ends + COUNTS * said.source_lost, said.lags + COUNTS * said.passed,
        (said.sample is not None) + COUNTS * said.tolerates,
        weight % DIGIT, weight // DIGIT % DIGIT, weight // DIGIT // DIGIT, *pieces_of(said.tag), *_sampled(said.sample),
    )  # fmt: skip
    if rank >= 0:
        slots[SHARES + rank // BITS] = float(1 << rank % BITS)
    return slots


def decode(sums: Sequence[float], members: int) -> FenceSum:
    """What the sum over `members` members says. A sum that is no number shows as one that nobody can agree with."""
    end = SHARES - (-members // BITS)
    try:
        values = [int(value) for value in sums[:end]]
    except (ValueError, OverflowError):  # NaN or infinite
        values = [-1] * end
    weight = values[WEIGHT] + (values[WEIGHT + 1] + values[WEIGHT + 2] * DIGIT) * DIGIT
    shares = values[SHARES]
    for slot in range(1, end - SHARES):
        shares |= values[SHARES + slot] << (slot * BITS)
    trailing, out = divmod(values[EXHAUSTED], COUNTS)
    sources_lost, ends = divmod(values[ENDS_AND_SOURCE], COUNTS)
    passed, lagging = divmod(values[LAGS_AND_PASSED], COUNTS)
    return FenceSum(
        values[COUNT], values[TAG : TAG + TAG_DIGITS], weight, values[CONTRIBUTED], shares, values[FAILED],
        values[CHANGE], values[NO_LEASE], out, trailing, values[READY], values[STOP], ends, sources_lost, lagging,
        passed, _differ(values),
    )  # fmt: skip


def _sampled(digest: int | None) -> tuple[int, ...]:
    """The slots of a digest: its digits, then their squares."""
    if digest is None:
        return (0,) * (2 * SAMPLE_DIGITS)
    a, b, c, d, e = digest & 0x7F, digest >> 7 & 0x7F, digest >> 14 & 0x7F, digest >> 21 & 0x7F, digest >> 28
    return a, b, c, d, e, a * a, b * b, c * c, d * d, e * e


def _differ(values: Sequence[int]) -> bool:
    tolerating, holders = divmod(values[HOLDERS], COUNTS)
    return not tolerating and any(
        holders * values[SQUARES + i] != values[SAMPLE + i] ** 2 for i in range(SAMPLE_DIGITS)
    )


@functools.lru_cache(maxsize=16)
def pieces_of(tag: int) -> tuple[int, ...]:
    """A tag in digits."""
    return tuple(tag >> DIGIT_BITS * place & DIGIT - 1 for place in range(TAG_DIGITS))


@functools.lru_cache(maxsize=16)
def tag_of(*facts: int) -> int:
    """64 bits over numbers that have to be equal on all members. Asked for twice per attempt, therefore remembered."""
    text = struct.pack(f"<{len(facts)}Q", *[fact & 0xFFFF_FFFF_FFFF_FFFF for fact in facts])
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=16)
def bitmap_of(ranks: tuple[int, ...]) -> int:
    """The bitmap in which these replica_ranks are set."""
    return sum(1 << rank for rank in ranks)


def places_missing(ranks: tuple[int, ...], shares: int) -> tuple[int, ...]:
    """Which of `ranks`, by their place among them, have no bit in `shares`."""
    expected = bitmap_of(ranks)
    if shares & expected == expected:
        return ()
    return tuple(place for place, rank in enumerate(ranks) if not shares >> rank & 1)
