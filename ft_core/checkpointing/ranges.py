"""The ranges that a state is cut into, and the manifest that describes them to a receiver. Pure.

A *range* is the unit that is requested, checked and retried: at most `RANGE_BYTES` of one large leaf, or a *pack* of
small leaves laid end to end, so that thousands of tiny tensors do not cost a request each. The cut is a pure function
of the leaf list, so every donor with the same leaves cuts alike, and `layout_digest` proves it to the receiver.

Invariants: the ranges cover every byte of every leaf exactly once; a range's `key` says which bytes it holds
independently of its position in the list, so a range prefetched under one layout is recognised under another.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ft_core.checkpointing.state_encoding import DTYPES, Leaf
from ft_core.checkpointing.tensor_bytes import CHECKSUM
from ft_core.errors import HealError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ft_core.checkpointing.own_state import Limit

FORMAT: Final = 2
"""Version of the manifest and of the range protocol; a receiver refuses any other."""
RANGE_BYTES: Final = 4 << 20
PACK_LEAF_MAX: Final = 64 << 10
"""Leaves up to this size are packed, which also means: copied when they are offered."""
DIMENSIONS_MAX: Final = 64
LEAF_SIZE_MAX: Final = 1 << 44
"""Elements in one tensor; what all of them may have in bytes: `own_state.Limit`."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `start:stop` of leaf `leaf`, or, where `leaf` is None, the pack of `members` (leaf, offset in the pack)."""

    leaf: int | None
    start: int
    stop: int
    key: str
    members: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Length in bytes, never 0."""
        return self.stop - self.start


def plan_ranges(leaves: Sequence[Leaf]) -> list[Range]:
    """Cut the leaves into ranges."""
    ranges: list[Range] = []
    pack: list[tuple[int, int]] = []
    size = 0
    for index, leaf in enumerate(leaves):
        nbytes = leaf.nbytes
        if nbytes > PACK_LEAF_MAX:
            identity = leaf.identity
            for start in range(0, nbytes, RANGE_BYTES):
                stop = min(start + RANGE_BYTES, nbytes)
                ranges.append(Range(index, start, stop, f"{identity}|{start}:{stop}"))
        elif nbytes:
            if size + nbytes > RANGE_BYTES:
                ranges.append(_pack(leaves, pack, size))
                pack, size = [], 0
            pack.append((index, size))
            size += nbytes
    if pack:
        ranges.append(_pack(leaves, pack, size))
    return ranges


def _pack(leaves: Sequence[Leaf], members: list[tuple[int, int]], size: int) -> Range:
    digest = hashlib.blake2b(digest_size=16)
    for index, _ in members:
        digest.update(leaves[index].identity.encode("utf-8", "surrogatepass") + b"\n")
    return Range(None, 0, size, f"pack {digest.hexdigest()}", tuple(members))


def layout_digest(ranges: Sequence[Range]) -> str:
    """Equal on two donors if and only if range i holds the same bytes of the same leaves on both."""
    digest = hashlib.blake2b(digest_size=16)
    for part in ranges:
        digest.update(part.key.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a receiver knows about an offer before its bytes arrive."""

    leaves: list[Leaf]
    ranges: list[Range]
    skeleton: Any
    digest: str
    classes: dict[str, str] = field(default_factory=dict)
    """Names of the user's classes in the state, each with the key path where it first occurs."""


def dump_manifest(leaves: Sequence[Leaf], skeleton: Any, classes: Mapping[str, str]) -> bytes:
    """The manifest as it travels."""
    rows = [[leaf.path, leaf.dtype_name, leaf.shape] for leaf in leaves]
    tree: dict[str, Any] = {"format": FORMAT, "range_bytes": RANGE_BYTES, "pack_leaf_max": PACK_LEAF_MAX}
    tree |= {"checksum": CHECKSUM, "leaves": rows, "classes": dict(classes)}
    return json.dumps({**tree, "skeleton": skeleton}, separators=(",", ":")).encode("ascii")


def parse_manifest(data: bytes | bytearray, limit: Limit) -> Manifest:
    """Parse and validate what a donor sent; `HealError` for anything that is not a manifest of this version.

    `limit`: the largest state believed. Checked before anything is built whose size the donor chooses.
    """
    try:
        tree = json.loads(data)
        found = (tree["format"], tree["range_bytes"], tree["pack_leaf_max"], tree["checksum"])
        ours = (FORMAT, RANGE_BYTES, PACK_LEAF_MAX, CHECKSUM)
        if found != ours:
            raise HealError(
                f"the donor cuts and checks its state as {found}, this receiver as {ours}; use one ft-training "
                "version, and xxhash on both machines or on none"
            )
        if len(tree["leaves"]) > limit.leaves:
            raise HealError(f"the donor's state has {len(tree['leaves'])} tensors, the limit is {limit.leaves}")
        leaves = [_leaf(*row) for row in tree["leaves"]]
        skeleton = tree["skeleton"]
        classes = {str(name): str(path) for name, path in tree["classes"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise HealError(f"received manifest is not valid: {e!r}") from e
    total = sum(leaf.nbytes for leaf in leaves)
    if total > limit.nbytes:
        raise HealError(f"the donor's state has {total} bytes, this receiver takes at most {limit.nbytes}: {limit.why}")
    ranges = plan_ranges(leaves)
    return Manifest(leaves, ranges, skeleton, layout_digest(ranges), classes)


def _leaf(path: Any, dtype: Any, shape: Any) -> Leaf:
    if type(path) is not str or type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"bad leaf {str(path)[:100]!r}")
    leaf = Leaf(path, DTYPES[dtype], tuple(shape))
    if len(shape) > DIMENSIONS_MAX or math.prod(shape) > LEAF_SIZE_MAX:
        raise ValueError(f"leaf {path[:100]!r} is too large: {shape}")
    return leaf
