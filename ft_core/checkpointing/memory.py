"""Raw bytes of tensors: views, a checksum, and a fast fingerprint that tells whether a checksum still holds.

The checksum of a range is `zlib.crc32`: about 7 GB/s here, and it releases the GIL, so a server thread that checks
megabytes does not hold up the training thread. Joining after a prefetch needs the donor's checksums of *all* its state
within milliseconds, so they are remembered (`ChecksumCache`). What validates a remembered one:

- the same address and length, and the tensor's `_version` (bumped by every in-place op that autograd sees), and
- the same fingerprint of the bytes *now*, because `p.data.add_()` bumps nothing. The fingerprint sums 64-bit words by
  their position modulo 512 and hashes the 512 sums: 34 GB/s, one thread, GIL released. Every change of a single word
  changes it, and so does a shift by anything but a multiple of 4 KiB.

Without numpy there is no fast single-threaded sum (torch's uses its thread pool, which training needs); the cache then
stays empty and every checksum is computed.

Invariant: a view from `byte_view` does not keep its tensor alive; whoever holds the view holds the tensor too.
Threads: `ChecksumCache` takes one short lock; the rest is pure.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import threading
import zlib
from typing import Any, Final

import torch

try:
    import numpy as _imported_numpy
except ImportError:
    _numpy: Any = None
else:
    _numpy = _imported_numpy

CACHE_ENTRIES_MAX: Final = 1 << 16
"""Remembered checksums (256 GiB of state at 4 MiB a range); a full cache starts over."""
_HUGE_PAGE: Final = 2 << 20
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
_COLUMNS: Final = 512
_ROW_BYTES: Final = _COLUMNS * 8


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


def checksum(data: memoryview | bytes | bytearray) -> int:
    """The checksum used on the wire."""
    return zlib.crc32(data)


def fingerprint(data: memoryview) -> bytes | None:
    """A 128-bit fingerprint, several times faster than the checksum; None where numpy is missing."""
    if _numpy is None:
        return None
    rows = len(data) // _ROW_BYTES
    digest = hashlib.blake2b(data[rows * _ROW_BYTES :], digest_size=16)
    if rows:
        words = _numpy.frombuffer(data, dtype=_numpy.uint64, count=rows * _COLUMNS)
        digest.update(words.reshape(rows, _COLUMNS).sum(axis=0).data)
    return digest.digest()


class ChecksumCache:
    """Checksums of ranges of live memory, each valid only while version and fingerprint are unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, int], tuple[int, bytes, int]] = {}  # (address, size) -> version, print, sum

    def compute(self, owner: torch.Tensor, start: int, data: memoryview, *, remember: bool) -> int:
        """The checksum of `data`, which is bytes `start:` of `owner`; pays for remembering it only if asked to."""
        key = (owner.data_ptr() + start, len(data))
        version = version_of(owner)
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and entry[0] == version and entry[1] == fingerprint(data):
            return entry[2]
        before = fingerprint(data) if remember else None
        value = checksum(data)
        # The memory may be changing under us (a live offer): remember only what held still meanwhile.
        if before is not None and before == fingerprint(data) and version == version_of(owner):
            with self._lock:
                if len(self._entries) >= CACHE_ENTRIES_MAX:
                    self._entries.clear()
                self._entries[key] = (version, before, value)
        return value


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's `_version`; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version
