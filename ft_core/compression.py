"""What other processes have compressed, with a bound on what it may become."""

from __future__ import annotations

import zlib


def inflate(packed: bytes, most: int) -> bytes:
    """What was compressed with `zlib.compress`, if it has at most `most` bytes.

    Raises:
        ValueError: it is nothing of the kind, cut off, or larger; no more than `most` bytes were made of it.
    """
    inflated = zlib.decompressobj()
    try:
        data = inflated.decompress(packed, most)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not inflated.eof:
        raise ValueError(f"it is cut off, or larger than {most} bytes")
    return data
