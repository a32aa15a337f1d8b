"""What workers print: read from pipes, prefixed with `[name/rank]`, shown, and kept in a file where that was asked for.

How it works. Every stream of every worker is a pipe; one thread reads them all and writes whole lines to the screen.
A traceback comes out in one piece, and the second worker that dies of the same error says so in one line
(`tracebacks`). The last lines of each worker are remembered for the report of its end. A carriage return counts as a
new line at most once a second, so that progress bars stay readable and cheap.

Invariants: one line of one worker is never mixed with another's; nothing is held back for longer than HELD_S;
memory is bounded per stream (MAX_LINE, TAIL). A screen that stands still holds up the workers as a plain pipe would,
and nothing else: no lock is held while writing to it.

Threads: "ftrun-output" reads and shows; `open`, `Stream.tail` and `settle` from any.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from dataclasses import dataclass, field
from io import FileIO
from typing import TYPE_CHECKING

from ft_core.launch.output.tracebacks import Block, Blocks, Line, Repeats

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

MAX_LINE = 64 * 1024
READ = 64 * 1024
"""What a pipe holds, so that reading once empties it."""
PASSES = 2
"""So often is everything read to have what was printed so far: the bytes, then the end."""
TAIL = 60
"""Lines remembered per worker."""
HELD_S = 0.5
PROGRESS_S = 3.0
"""How often a progress bar, which writes over its line, is shown."""
CLOSE_S = 2.0
"""How long a screen that stands still may hold up the end."""
log = logging.getLogger("ft_core.launch")


@dataclass(eq=False)
class Stream:
    """One pipe of one worker."""

    fd: int
    label: str
    tail: deque[str]
    """Shared by the streams of one worker."""
    err: bool
    file: FileIO | None = None
    partial: bytes = b""
    """The line that has not ended yet."""
    flushed: bool = False
    """The beginning of the current line was shown already, because nothing followed for long."""
    blocks: Blocks = field(default_factory=Blocks)
    heard_at: float = 0.0
    progress_at: float = 0.0


class Output:
    """All streams. `show(label, lines, err)` is called on this class's thread, with lines of one worker's stream."""

    def __init__(self, show: Callable[[str, list[str], bool], None]) -> None:
        self._show = show
        self._changed = threading.Condition()
        self._streams: dict[int, Stream] = {}
        self._asked = self._settled = 0
        """Numbers of the last `settle` that began, and of the last that is answered."""
        self._closed = False
        self._repeats = Repeats()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ftrun-output", daemon=True)

    def __repr__(self) -> str:
        return f"Output({len(self._streams)} streams)"

    def start(self) -> None:
        """Start the thread."""
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    def open(self, label: str, tail: deque[str], *, err: bool, path: str = "") -> tuple[Stream, int]:
        """A new pipe. Returns its stream and the write end, which the caller hands to the worker and closes.

        Raises:
            OSError: `path` cannot be written, or there are no descriptors left.
        """
        file = FileIO(path, "a") if path else None  # unbuffered: what was printed is there
        reading, writing = os.pipe()
        stream = Stream(reading, label, tail, err, file)
        with self._changed:
            self._streams[reading] = stream
            self._selector.register(reading, selectors.EVENT_READ)
        os.write(self._wake_write, b"w")
        return stream, writing

    def settle(self, timeout_s: float, streams: Sequence[Stream] | None = None) -> None:
        """Wait until everything that was printed before this call is shown, for at most `timeout_s`.

        Whoever lives or holds a pipe open is not waited for. `streams`: once these have ended, that is enough.
        """
        with self._changed:
            if self._closed:
                return
            self._asked = asked = self._asked + 1
            os.write(self._wake_write, b"s")
            self._changed.wait_for(lambda: self._settled >= asked or self._closed or self._over(streams), timeout_s)

    def _over(self, streams: Sequence[Stream] | None) -> bool:
        return streams is not None and not any(stream in self._streams.values() for stream in streams)

    def close(self) -> None:
        """Show what is there and end the thread. Idempotent."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        os.write(self._wake_write, b"c")
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # else it hangs on a screen that stands still
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closed:
            self._pass(HELD_S if self._streams else None)
            with self._changed:
                asked = self._asked
            if asked > self._settled:
                for _ in range(PASSES):
                    self._pass(0)
                with self._changed:
                    self._settled = asked
                    self._changed.notify_all()
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if now - stream.heard_at > HELD_S:
                    self._shown(stream, self._silent, now)
        for _ in range(PASSES):
            self._pass(0)
        for stream in list(self._streams.values()):
            self._end(stream)

    def _pass(self, timeout_s: float | None) -> None:
        """Read once from every stream that has something."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._wake_read:
                os.read(self._wake_read, 4096)  # there is something to look at
                continue
            stream = self._streams[key.fd]
            data = os.read(key.fd, READ)
            if not data:
                self._end(stream)
                continue
            self._shown(stream, self._take, data)

    def _shown(self, stream: Stream, show: Callable[..., None], *arguments: object) -> None:
        """Show something of a stream. A mistake of ours in it must not end this thread: workers stand still as soon as
        nobody reads their pipes."""
        try:
            show(stream, *arguments)
        except Exception:
            log.exception("ftrun: some output of %s could not be shown (please report it); the rest is", stream.label)
            stream.partial, stream.blocks = b"", Blocks()

    def _take(self, stream: Stream, data: bytes) -> None:
        stream.heard_at = time.monotonic()
        self._keep(stream, data)
        *whole, partial = (stream.partial + data).split(b"\n")
        if len(partial) > MAX_LINE:
            cut = _whole_characters(partial)
            whole.append(partial[:cut])
            partial = partial[cut:]
        # What a carriage return wrote over is not shown; one at the end may be half of a line break.
        before, written_over, partial = partial.rpartition(b"\r") if partial[-1:] != b"\r" else _last_two(partial)
        lines = [_text(_overwritten(line)) for line in whole]
        if stream.flushed and lines:
            stream.flushed = False
            if not lines[0]:
                del lines[0]  # only the end of a line that was shown already
        if written_over and stream.heard_at - stream.progress_at > PROGRESS_S and (head := _overwritten(before)):
            stream.progress_at = stream.heard_at
            lines.append(_text(head))
        stream.partial = partial
        self._lines(stream, lines)

    def _keep(self, stream: Stream, data: bytes) -> None:
        """Into the file. One that cannot be written must not stop the training."""
        if stream.file is None:
            return
        try:
            stream.file.write(data)
        except OSError as error:
            self._show(stream.label, [f"(no longer into {stream.file.name}: {error.strerror})"], True)
            stream.file.close()
            stream.file = None

    def _silent(self, stream: Stream, now: float) -> None:
        """Nothing was heard for a while: show what is held, also a line without its end."""
        if stream.partial and now - stream.progress_at > PROGRESS_S:
            line = _overwritten(stream.partial)
            stream.partial, stream.flushed, stream.progress_at = b"", True, now
            if line:
                self._lines(stream, [_text(line)])
        self._emit(stream, stream.blocks.flush())

    def _lines(self, stream: Stream, lines: Sequence[str]) -> None:
        out: list[Block | Line] = []
        for line in lines:
            stream.tail.append(line)
            out += stream.blocks.feed(line)
        self._emit(stream, out)

    def _end(self, stream: Stream) -> None:
        self._shown(stream, self._show_rest)
        if stream.file is not None:
            stream.file.close()
        with self._changed:
            self._selector.unregister(stream.fd)
            del self._streams[stream.fd]
            self._changed.notify_all()
        os.close(stream.fd)

    def _show_rest(self, stream: Stream) -> None:
        if stream.partial:
            self._lines(stream, [_text(_overwritten(stream.partial))])
        self._emit(stream, stream.blocks.flush())

    def _emit(self, stream: Stream, out: list[Block | Line]) -> None:
        if not out:
            return
        lines: list[str] = []
        for item in out:
            if isinstance(item, Block):
                same = self._repeats.seen(item, stream.label, time.monotonic())
                lines += [same] if same is not None else item.lines
            else:
                lines.append(item.text)
        self._show(stream.label, lines, stream.err)


def _text(line: bytes) -> str:
    return line.decode(errors="replace")


def _overwritten(line: bytes) -> bytes:
    """What a terminal shows of a line with carriage returns: roughly, what follows the last one."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _last_two(partial: bytes) -> tuple[bytes, bytes, bytes]:
    """Split at the last carriage return but the one that ends it."""
    before, written_over, last = partial.rstrip(b"\r").rpartition(b"\r")
    return before, written_over, last + b"\r"


def _whole_characters(line: bytes) -> int:
    """Where to cut so that no UTF-8 character is cut in two."""
    for back in range(1, min(4, len(line))):
        if line[-back] & 0xC0 == 0xC0:  # the first byte of one that needs more
            needs = 2 if line[-back] < 0xE0 else 3 if line[-back] < 0xF0 else 4
            return len(line) - back if back < needs else len(line)
        if line[-back] < 0x80:
            break
    return len(line)
