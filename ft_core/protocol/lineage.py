"""The lineage of a state: a hash over the history that led to it, which tells two states of one step apart. Pure."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def fold_lineage(lineage: int, quorum_id: int, attempt: int, members: Sequence[str]) -> int:
    """The lineage after a commit: a hash over the whole history of quorums, attempts and members. 63 bits."""
    text = struct.pack("<QQQ", lineage & (2**64 - 1), quorum_id, attempt) + "\0".join(members).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
