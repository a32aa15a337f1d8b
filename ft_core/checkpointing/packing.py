"""A small state in one piece: manifest and tensor bytes behind each other, for results that are no offers.

Layout: length of the manifest (8 bytes, little-endian), the manifest, the leaves' bytes in its order.
"""

from __future__ import annotations

import struct
from typing import Any

from ft_core.checkpointing.own_state import limit_for
from ft_core.checkpointing.ranges import dump_manifest, parse_manifest
from ft_core.checkpointing.state_encoding import decode_tree, encode
from ft_core.checkpointing.tensor_bytes import byte_view, fresh
from ft_core.errors import HealError

_LENGTH = struct.Struct("<Q")


def pack(state: object) -> bytes:
    """`state` as bytes. Raises `EncodingError` naming the key path of what cannot be carried."""
    found = encode(state)
    manifest = dump_manifest(found.leaves, found.skeleton, {name: path for name, (_, path) in found.classes.items()})
    return b"".join([_LENGTH.pack(len(manifest)), manifest, *(bytes(byte_view(t)) for t in found.tensors)])


def unpack(data: bytes, like: object = None) -> Any:
    """What `pack` was given. `like`: a state whose classes of the user's may be rebuilt. Raises `HealError`."""
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise HealError(f"a packed state of {len(view)} bytes has no header")
    end = _LENGTH.size + _LENGTH.unpack(view[: _LENGTH.size])[0]
    manifest = parse_manifest(bytes(view[_LENGTH.size : end]), limit_for(None))
    if end + sum(leaf.nbytes for leaf in manifest.leaves) != len(view):
        raise HealError("a packed state is not as long as its manifest says")
    tensors = []
    for leaf in manifest.leaves:
        tensor = fresh(leaf.shape, leaf.dtype)
        byte_view(tensor)[:] = view[end : end + leaf.nbytes]
        end += leaf.nbytes
        tensors.append(tensor)
    known = {name: kind for name, (kind, _) in encode(like, dry=True).classes.items()}
    return decode_tree(manifest.skeleton, tensors, known)
