"""How a state is cut into ranges, and what of a manifest is believed."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_core.checkpointing.own_state import limit_for
from ft_core.checkpointing.ranges import (
    PACK_LEAF_MAX,
    RANGE_BYTES,
    dump_manifest,
    layout_digest,
    parse_manifest,
    plan_ranges,
)
from ft_core.checkpointing.state_encoding import Leaf
from ft_core.errors import HealError

ANY = limit_for(None)
sizes = st.integers(0, 100) | st.integers(PACK_LEAF_MAX - 2, PACK_LEAF_MAX + 2) | st.integers(0, 3 * RANGE_BYTES)


@given(st.lists(sizes, max_size=120))
def test_ranges_cover_every_byte_once(nbytes: list[int]) -> None:
    leaves = [Leaf(f"state[{i}]", torch.uint8, (n,)) for i, n in enumerate(nbytes)]
    ranges = plan_ranges(leaves)
    covered = [0] * len(leaves)
    for part in ranges:
        assert 0 < part.nbytes <= RANGE_BYTES
        if part.leaf is None:
            at = 0
            for leaf, offset in part.members:
                assert offset == at
                assert covered[leaf] == 0
                covered[leaf] = leaves[leaf].nbytes
                at += leaves[leaf].nbytes
            assert at == part.nbytes
        else:
            assert part.start == covered[part.leaf]  # in order, without gaps
            covered[part.leaf] = part.stop
    assert covered == nbytes
    assert len({part.key for part in ranges}) == len(ranges)


def test_thousands_of_tiny_leaves_are_one_range() -> None:
    leaves = [Leaf(f"state[{i}]", torch.float32, (10,)) for i in range(5000)]
    assert len(plan_ranges(leaves)) == 1


def test_the_digest_tells_layouts_apart() -> None:
    def digest(*leaves: Leaf) -> str:
        return layout_digest(plan_ranges(leaves))

    a = Leaf("state['a']", torch.float32, (8,))
    assert digest(a) == digest(Leaf("state['a']", torch.float32, (8,)))
    others = [
        Leaf("state['b']", torch.float32, (8,)),
        Leaf("state['a']", torch.int32, (8,)),
        Leaf("state['a']", torch.float32, (2, 4)),
    ]
    assert len({digest(a), *(digest(other) for other in others)}) == 4


def manifest(**changes: Any) -> bytes:
    tree = json.loads(dump_manifest([Leaf("state", torch.float32, (2, 3))], ["T", 0], {}))
    return json.dumps({**tree, **changes}).encode()


def test_a_manifest_round_trips() -> None:
    parsed = parse_manifest(manifest(), ANY)
    assert parsed.leaves == [Leaf("state", torch.float32, (2, 3))]
    assert parsed.skeleton == ["T", 0]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"format": 1}, "version"),
        ({"classes": [1]}, "not valid"),
        ({"leaves": [["p", "float32", [1] * 65]]}, "not valid"),
        ({"range_bytes": 1}, "version"),
        ({"checksum": "crc32"}, "xxhash on both"),
        ({"leaves": [["p", "float32", [-1]]]}, "not valid"),
        ({"leaves": [["p", "float32", [1 << 60]]]}, "not valid"),
        ({"leaves": [["p", "qint8", [1]]]}, "not valid"),
        ({"leaves": [["p", "float32"]]}, "not valid"),
        ({"leaves": [[1, "float32", [1]]]}, "not valid"),
        ({"leaves": 5}, "not valid"),
    ],
)
def test_a_bad_manifest_is_refused(changes: Any, word: str) -> None:
    with pytest.raises(HealError, match=word):
        parse_manifest(manifest(**changes), ANY)


@pytest.mark.parametrize("data", [b"", b"[]", b"\x80\x04", b"null", b"[" * 100_000])
def test_garbage_is_not_a_manifest(data: bytes) -> None:
    with pytest.raises(HealError, match="not valid"):
        parse_manifest(data, ANY)
