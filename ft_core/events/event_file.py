"""The files of one log: parts of bounded size, the oldest removed, each beginning with who writes it.

How it works. A log is `SOURCE.PID.START.PART.jsonl` in one folder. A part that has grown to PART_BYTES is followed by
the next; before a part is opened, the oldest parts of the same source (of earlier processes, too) are removed until
what is left and the new one take KEPT_BYTES at most. Nothing is buffered here: what `write` was given is the kernel's
when it returns, and survives a SIGKILL of this process.

Invariants: only files of this source are ever removed, never the one that is written; a line that the disk took in
part only is ended before the next one begins. Threads: the log's writer.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from ft_core.events.schema import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable

PART_BYTES = 4 << 20
KEPT_BYTES = 64 << 20
"""Of all parts of one source in one folder: at about 200 bytes a second this is four days of an undisturbed replica."""
KEPT_FILES = 200
"""Parts of one source, however short: a group may be started again and again."""
NAME_MAX = 80


def file_name(source: str) -> str:
    """A source as it stands in names of files."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", source)[:NAME_MAX] or "unnamed"


class EventFile:
    """Where the lines of one log go.

    Args:
        folder: made if it is not there.
        source: whose log it is; part of the files' names.
        start: a word that no other log of this source and process has.
        header: makes the first line of a part, given its number.
    """

    def __init__(self, folder: str, source: str, start: str, header: Callable[[int], bytes]) -> None:
        self.part_bytes, self.kept_bytes, self.kept_files = PART_BYTES, KEPT_BYTES, KEPT_FILES
        self._folder = folder
        self._source = file_name(source)
        self._stem = f"{self._source}.{os.getpid()}.{start}"
        self._header = header
        self._fd = -1
        self._part = 0
        self._size = 0
        self._torn = False
        """The last line was written in part only."""

    def __repr__(self) -> str:
        return f"EventFile({self.path}, {self._size} bytes)"

    @property
    def path(self) -> str:
        """The part that is written, or the next one."""
        return os.path.join(self._folder, f"{self._stem}.{self._part}{SUFFIX}")

    def write(self, lines: bytes) -> None:
        """Append whole lines. Raises OSError; some of them may have been written then."""
        if self._fd >= 0 and self._size + len(lines) > self.part_bytes:
            self.close()
            self._part += 1
        if self._fd < 0:
            self._open()
        self._append(lines)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _open(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        self._remove_oldest()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        if self._size == 0:
            self._append(self._header(self._part))

    def _append(self, data: bytes) -> None:
        if self._torn:
            data = b"\n" + data
        left = memoryview(data)
        while left:
            try:
                written = os.write(self._fd, left)
            except OSError:
                self._torn = self._torn or 0 < len(left) < len(data)
                raise
            self._size += written
            left = left[written:]
        self._torn = False

    def _remove_oldest(self) -> None:
        mine = re.compile(rf"{re.escape(self._source)}\.\d+\.[0-9a-z]+\.\d+{re.escape(SUFFIX)}")
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if mine.fullmatch(entry.name) and entry.path != self.path:
                    with contextlib.suppress(OSError):  # another process of this source has removed it
                        info = entry.stat()
                        found.append((info.st_mtime, entry.path, info.st_size))
        found.sort()
        total = sum(size for _, _, size in found) + self.part_bytes
        while found and (total > self.kept_bytes or len(found) >= self.kept_files):
            _, path, size = found.pop(0)
            total -= size
            with contextlib.suppress(OSError):
                os.unlink(path)
