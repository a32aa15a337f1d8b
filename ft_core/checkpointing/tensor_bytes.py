"""Raw bytes of tensors: views of their memory, fresh memory, and the checksum used on the wire.

The checksum of a range is xxh3 with 64 bits: it decides which ranges of a prefetched state need not travel again, and
with 32 bits one in four billion that differ would stay. It is faster than crc32 and releases the GIL, so a server
thread that checks megabytes does not hold up the training thread. It is computed anew for every answer. Remembering it
for state that did not change was tried and given up: `_version` misses what is written behind autograd's back
(`p.data`, numpy views, extensions), and every fingerprint faster than the checksum itself is a sum, which such changes
(a swap of two rows, +1 here and -1 there) leave equal. Where xxhash is not installed blake2b does the same, slower.

Invariant: a view from `byte_view` does not keep its tensor alive; whoever holds the view holds the tensor too.
Threads: pure.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from typing import Any, Final

import torch

try:
    import xxhash
except ImportError:  # a machine for which it is not built

    def checksum(data: memoryview | bytes | bytearray) -> int:
        """The checksum used on the wire: 64 bits."""
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    CHECKSUM = "blake2b-64"
else:

    def checksum(data: memoryview | bytes | bytearray) -> int:
        """The checksum used on the wire: 64 bits."""
        return int(xxhash.xxh3_64_intdigest(data))

    CHECKSUM = "xxh3-64"
"""Which one it is here; both ends of a transfer must have the same."""

_HUGE_PAGE: Final = 2 << 20
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty`, asking for huge pages: the first touch of small ones costs more than receiving what goes there."""
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.numel() * tensor.element_size()
    if _madvise is not None and size >= 2 * _HUGE_PAGE:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)  # advice: may be refused
    return tensor


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's `_version`; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version
