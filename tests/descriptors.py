"""The descriptors that this process holds, each told apart from others that had its number before.

Invariant: what a test compares is what has been opened since, never how many there are: other tests' garbage goes, and
their threads end, while a test runs, and a count of all of the process' descriptors moves with them.
"""

from __future__ import annotations

import contextlib
import os


def descriptors() -> set[str]:
    """Each as its number and what it refers to; a test that leaves nothing open has none that it had not before."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile: by a thread of a test before, or by listdir
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found
