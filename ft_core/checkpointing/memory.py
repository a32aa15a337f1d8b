"""Raw bytes of tensors: views of their memory, fresh memory, and the checksum used on the wire.

The checksum of a range is `zlib.crc32`: about 7 GB/s here, and it releases the GIL, so a server thread that checks
megabytes does not hold up the training thread. It is computed anew for every answer. Remembering it for state that
did not change was tried and given up: `_version` misses what is written behind autograd's back (`p.data`, numpy views,
extensions), and every fingerprint faster than the checksum itself is a sum, which such changes (a swap of two rows,
+1 here and -1 there) leave equal.

Invariant: a view from `byte_view` does not keep its tensor alive; whoever holds the view holds the tensor too.
Threads: pure.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from typing import Any, Final

import torch

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


def checksum(data: memoryview | bytes | bytearray) -> int:
    """The checksum used on the wire."""
    return zlib.crc32(data)


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's `_version`; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version
