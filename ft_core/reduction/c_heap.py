"""The C heap of a training process: memory that each step takes and returns must not go back to the kernel in between.

How it works. glibc gives the end of its heap back as soon as more than a threshold of it is free, and takes blocks
above another threshold from the kernel one by one. What a step then takes again (gradients, an optimizer's temporaries)
comes as fresh pages, each of which is a fault and a fill with zeros: measured 2,000 to 7,000 faults a step, 1.2 times
the step time of torch's DDP. Both thresholds grow by themselves, up to 32 and 64 MiB, when a block is freed that was
large enough to come from the kernel. torch's DDP frees such blocks as it rebuilds its buckets after the first step; our
buckets are never rebuilt. So one block is taken and freed on purpose. Nothing touches it: it costs two system calls.

Not a setting of the allocator: who sets one (MALLOC_TRIM_THRESHOLD_ and the like, or another allocator) has turned this
adaptation off, and keeps what was set. Other C libraries have no such thresholds, and nothing happens.
Threads: none.
"""

from __future__ import annotations

import functools

import torch

LARGEST_ADAPTED_BYTES = 32 << 20
"""The largest block after which glibc adapts (DEFAULT_MMAP_THRESHOLD_MAX)."""
OVERHEAD_BYTES = 2 << 12
"""Header, alignment and rounding up to pages, generously."""


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one. Does its work once per process."""
    torch.empty(LARGEST_ADAPTED_BYTES - OVERHEAD_BYTES, dtype=torch.uint8, device="cpu")
