"""Tries a path that all hosts should share: writable, the same everywhere, renames atomic and seen by the others.

How it works. Each host writes a file of its own, under another name first, into a folder of this meeting, and renames
it. Then each reads the others' files while it goes on replacing its own: every read has to find one whole version of
one file. A network file system may show a change late, so a missing file is looked for until SEEN_S.

Invariants: only files in folders `.ft-doctor-...` below the path are written, and they are removed. A file system that
hangs takes LIMIT_S. Collects; decides nothing.

Threads: "ft-doctor-storage", one at a time, which a hanging system keeps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from ft_core.doctor.facts import TEXT_MAX, Seen, StorageFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

T = TypeVar("T")
REWRITES = 40
LINES = 2000
"""Of a file: so long that writing it takes more than one moment."""
SEEN_S = 5.0
LIMIT_S = 20.0
ENDS_S = 1.0
"""How long what is being written may take to end if ft-doctor is ended."""
PREFIX = ".ft-doctor-"
READ_MAX = 16
"""Others whose files are read while they are replaced."""
PAUSE_S = 0.1


def alone(path: str) -> StorageFacts:
    """What this host alone can say."""
    facts = StorageFacts(path)

    def work() -> int:
        # Several hosts do this at the same time, and in containers they have the same process ids.
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=path)
        try:
            write(folder, 0, 0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return shutil.disk_usage(path).free >> 20

    facts.error, free_mb = bounded(work)
    facts.free_mb = free_mb or 0
    return facts


def bounded(work: Callable[[], T], limit_s: float = LIMIT_S) -> tuple[str, T | None]:
    """Why some work on files failed, or '', and what it returns. A file system that hangs holds only a thread."""
    done: list[tuple[str, T | None]] = []

    def run() -> None:
        try:
            done.append(("", work()))
        except OSError as error:
            done.append(((error.strerror or str(error))[:TEXT_MAX], None))

    thread = threading.Thread(target=run, name="ft-doctor-storage", daemon=True)
    thread.start()
    try:
        thread.join(limit_s)
    except KeyboardInterrupt:
        thread.join(ENDS_S)  # whoever takes back what it writes does so afterwards
        raise
    return done[0] if done else (f"no answer within {limit_s:g} s: the file system, or its server, hangs", None)


def folder_of(path: str, nonce: str) -> str:
    """Where the hosts of a meeting write."""
    return os.path.join(path, PREFIX + nonce)


def write(folder: str, index: int, version: int) -> None:
    """A whole file, in one moment. Raises OSError."""
    name = os.path.join(folder, str(index))
    with open(f"{name}.partial", "w", encoding="ascii") as file:
        file.write(f"{index} {version}\n" * LINES)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{name}.partial", name)


def whole(text: str, index: int) -> bool:
    """Whether this is one version of that host's file."""
    lines = text.splitlines()
    return len(lines) == LINES and len(set(lines)) == 1 and lines[0].startswith(f"{index} ")


def begin(folder: str, index: int) -> str:
    """Write the first version. Returns why that cannot be."""

    def work() -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # never the path itself: if that is not mounted, it must not be made
        write(folder, index, 0)

    return bounded(work)[0]


def look(folder: str, index: int, others: Collection[int]) -> Seen:
    """Read the others' files while this one's is replaced again and again."""
    error, seen = bounded(lambda: _look(folder, index, others))
    return seen or Seen(error=error)


def _look(folder: str, index: int, others: Collection[int]) -> Seen:
    seen, began = Seen(), time.monotonic()
    left = set(others)
    while left:
        left -= {other for other in left if os.path.exists(os.path.join(folder, str(other)))}
        if not left or time.monotonic() - began > SEEN_S:
            break
        os.listdir(folder)  # makes a client of NFS look again
        time.sleep(PAUSE_S)
    seen.late_s = time.monotonic() - began
    seen.missing = sorted(left)
    torn: set[int] = set()
    read = [other for other in others if other not in left][:READ_MAX]
    for version in range(1, REWRITES + 1):
        write(folder, index, version)
        torn |= {other for other in read if not _reads(folder, other)}
    seen.torn = sorted(torn)
    return seen


def _reads(folder: str, other: int) -> bool:
    try:
        with open(os.path.join(folder, str(other)), encoding="ascii") as file:
            return whole(file.read(), other)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # ESTALE: the file server says that it was replaced, which is an answer


def end(folder: str) -> None:
    """Remove what this meeting has written; others may do the same at this moment."""
    bounded(lambda: shutil.rmtree(folder, ignore_errors=True))
