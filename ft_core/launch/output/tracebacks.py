"""Python tracebacks in what workers print: kept in one piece, and told only once when many workers die of the same.

How it works. `Blocks` reads one stream line by line. What is no traceback passes at once. A traceback is held from its
"Traceback (most recent call last):" to the line with the exception, with everything chained to it, and comes out as
one `Block`:

    idle --header--> frames --exception--> ended --"", "During handling ...", "", header--> frames
      ^                                      |
      +------- any other line, flush() ------+

An indented line after the exception (a multi-line message) still belongs to it; a line that is not indented ends the
block and passes as plain text. Exception groups (lines that begin with | or +), the "Original Traceback" that a
DataLoader worker's error carries, the compiler's `  File "x.py", line 3` without a header, and the "[rank0]: " that
torch.distributed puts before every line of a traceback are understood; so are the markers of Python 3.11 to 3.13,
which are indented lines like others.

Invariants: every line comes out once and unchanged, and those of a block in order; nothing is held beyond MAX_LINES
lines, MAX_CHARS characters or MAX_STRAY lines of other text in between. A stream that falls silent holds its last
block (the next line could continue it) until the caller says `flush()`.

`Repeats` remembers the last MAX_REMEMBERED different blocks for WINDOW_S. Pure: `now` is an argument. Not thread-safe.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_LINES = 500
MAX_CHARS = 256 * 1024
"""A held block that reaches one of these comes out as it is; what follows passes as plain lines."""
MAX_STRAY = 20
"""Lines of something else (a native library's log) that may stand between those of a traceback."""
WINDOW_S = 60.0
"""An equal error of another worker within this time is told in one line."""
MAX_REMEMBERED = 64

_PREFIX = r"(?P<prefix>\[[^\]\s]+\]:? ?)?"
_HEADER = re.compile(_PREFIX + r"(?:Traceback \(most recent call last\):|  File \"[^\"]+\", line \d+)\s*")
_GROUP = re.compile(_PREFIX + r"\s*\+ Exception Group Traceback \(most recent call last\):\s*")
_BAR = re.compile(r"\s+[|+]")
_CLOSED = re.compile(r"\s\+-+\s*$")
_ORIGINAL = re.compile(r"Original Traceback \(most recent call last\):\s*")
_ANY_HEADER = re.compile(r"(?:Original |Exception Group )?Traceback \(most recent call last\):\s*")
_EXCEPTION = re.compile(r"[^\W\d][\w.]*(?:<locals>\.[\w.]+)*(?::(?:\s.*)?)?", re.DOTALL)
_LOOSE = re.compile(r"(?:[^\W\d][\w.]*)?(?:Error|Exception|Interrupt|Exit)(?::\s.*)?|Fatal Python error: .*")
_CHAINS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_DIFFERS = (
    (re.compile(r"^\[[^\]\s]+\]:? ", re.MULTILINE), ""),
    (re.compile(r"\b0x[0-9a-fA-F]+"), "0x"),
    (re.compile(r"\b((?:local_|global_|group_)?rank|pid|process)(\W{0,2})\d+", re.IGNORECASE), r"\1\2#"),
    (re.compile(r"\b([A-Za-z][\w.]*)-\d+(?::[0-9a-fA-F][0-9a-fA-F-]*|/\d+)"), r"\1-#"),
)
"""What may differ between two workers that died of the same: [rank0], addresses, process ids, ranks, replica ids."""


@dataclass(frozen=True)
class Line:
    """A line that is no part of a traceback."""

    text: str


@dataclass(frozen=True)
class Block:
    """A whole traceback, with what is chained to it; or as much of one as came."""

    lines: tuple[str, ...]


Out = Line | Block


class Blocks:
    """The tracebacks of one stream; the header of this file has the rules."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._chars = 0
        self._stray = 0
        self._prefix = ""
        self._state = "idle"
        """idle, frames, group, ended, blank (an empty line after the end), or chain (after a chaining sentence)."""
        self._sure = 0
        """So many of the held lines belong to the block even if it is not continued."""

    def __repr__(self) -> str:
        return f"Blocks({self._state}, {len(self._held)} lines held)"

    def feed(self, line: str) -> list[Out]:
        """Take one line, with or without its line break; returns what may be shown now."""
        line = line.rstrip("\r\n")
        if self._state == "idle":
            return self._begin(line)
        body = self._body(line)
        if body is None:  # of somebody else, who writes into the same pipe
            return self._interrupt(line)
        return self._continue(line, body)

    def flush(self) -> list[Out]:
        """The stream ended, or has been silent for long: everything that is held."""
        held, sure = self._held, self._sure
        self._held, self._state, self._prefix = [], "idle", ""
        self._chars = self._stray = self._sure = 0
        if not held:
            return []
        return [Block(tuple(held[:sure])), *(Line(text) for text in held[sure:])]

    def _begin(self, line: str) -> list[Out]:
        found = _HEADER.fullmatch(line) or _GROUP.fullmatch(line)
        if found is None:
            return [Line(line)]
        self._prefix = found["prefix"] or ""
        return self._hold(line, "group" if _GROUP.fullmatch(line) else "frames")

    def _body(self, line: str) -> str | None:
        """The line without the prefix of this block; None: it has not got it."""
        if line.startswith(self._prefix):
            return line[len(self._prefix) :]
        # torch.distributed leaves empty lines without it.
        return "" if line.strip() in ("", self._prefix.rstrip()) else None

    def _continue(self, line: str, body: str) -> list[Out]:
        empty, indented = not body.strip(), body[:1] in (" ", "\t")
        if self._state == "frames":
            if empty or indented:
                return self._hold(line, "frames")
            return self._hold(line, "ended") if _EXCEPTION.fullmatch(body) else self._interrupt(line)
        if self._state == "group" and _BAR.match(body):
            return self._hold(line, "group")
        if self._state in ("group", "ended"):
            if empty:
                return self._hold(line, "blank", sure=False)
            if indented:
                return self._hold(line, "ended")
            if _ORIGINAL.fullmatch(body):
                return self._hold(line, "frames")
        elif self._state == "blank" and body.strip() in _CHAINS:
            return self._hold(line, "chain", sure=False)
        elif self._state == "chain":
            if empty:
                return self._hold(line, "chain", sure=False)
            if _HEADER.fullmatch(body) or _GROUP.fullmatch(body):
                return self._hold(line, "group" if _GROUP.fullmatch(body) else "frames")
        return [*self.flush(), *self._begin(line)]

    def _hold(self, line: str, state: str, *, sure: bool = True) -> list[Out]:
        self._held.append(line)
        self._chars += len(line)
        self._state = state
        if sure:
            self._sure = len(self._held)
        return self.flush() if len(self._held) >= MAX_LINES or self._chars >= MAX_CHARS else []

    def _interrupt(self, line: str) -> list[Out]:
        """A line that cannot belong to the block, which may go on after it."""
        self._stray += 1
        open_group = self._state == "group" and not _CLOSED.search(self._held[-1])
        if (self._state == "frames" or open_group) and self._stray <= MAX_STRAY:
            return [Line(line)]
        return [*self.flush(), *self._begin(line)]


class Repeats:
    """Which errors were shown lately, and whose they were."""

    def __init__(self) -> None:
        self._shown: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Digest of a block -> who printed it in full last, and when; the oldest first."""

    def __repr__(self) -> str:
        return f"Repeats({len(self._shown)} errors remembered)"

    def seen(self, block: Block, who: str, now: float) -> str | None:
        """None: show the block in full. Otherwise the line to show instead: it was there a moment ago.

        Args:
            block: a traceback of this worker.
            who: the worker's label without brackets, such as replica-0/1.
            now: seconds, of a clock that does not go back.
        """
        key = _digest("\n".join(block.lines))
        first = self._shown.get(key)
        if first is not None and now - first[1] <= WINDOW_S:
            error = last_error(block.lines)
            same = "the same error again" if first[0] == who else f"the same error as [{first[0]}]"
            return same + (f": {error}" if error else "")
        self._shown[key] = (who, now)
        self._shown.move_to_end(key)
        while len(self._shown) > MAX_REMEMBERED:
            self._shown.popitem(last=False)
        return None


def last_error(lines: Iterable[str]) -> str:
    """The exception that the last traceback among `lines` ends with, in one line; '' if there is none.

    Of an exception group it is the group's own line. Where there is no traceback at all, the last line that looks like
    an exception counts, and so does the interpreter's "Fatal Python error".
    """
    error, depth, loose = "", 0, ""
    in_frames = in_group = False
    for line in _plain(lines):
        starts_group = _GROUP.fullmatch(line) is not None
        bar = _BAR.match(line) if in_group or starts_group else None
        in_group = bar is not None
        level = bar.end() if bar else 0
        body = line[level:].removeprefix(" ") if bar else line
        if starts_group or _ANY_HEADER.fullmatch(body) or _HEADER.fullmatch(body):
            in_frames = True
        elif in_frames and _EXCEPTION.fullmatch(body):
            in_frames = False
            if not level > depth > 0:  # otherwise: one of those in the group whose own line we have
                error, depth = body, level
        elif _LOOSE.fullmatch(body):
            loose = body
    return error or loose


def fingerprint(lines: Iterable[str]) -> str:
    """Equal for runs that ended with the same traceback, whosever they were; '' if there is none among `lines`."""
    blocks = Blocks()
    out = [one for line in lines for one in blocks.feed(line)] + blocks.flush()
    last = next((one for one in reversed(out) if isinstance(one, Block)), None)
    return _digest("\n".join(last.lines)).hex() if last is not None else ""


def _digest(text: str) -> bytes:
    for pattern, instead in _DIFFERS:
        text = pattern.sub(instead, text)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _plain(lines: Iterable[str]) -> Sequence[str]:
    prefix = re.compile(_PREFIX)
    return [prefix.sub("", line.rstrip(), count=1) for line in lines]
