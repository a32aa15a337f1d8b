"""What ftrun shows: the workers' lines, its own, and on a terminal one live status line per group.

How it works. `rich.live` keeps the status lines at the bottom of a terminal and scrolls everything else above them.
Without a terminal (or without `rich`) there are plain lines only: workers' to the stream they came from, ftrun's own to
stderr. Status lines are on stderr, so `ftrun ... > file` shows them and still gets the workers' lines into the file.

Invariants: whatever becomes of the terminal, a pipe's reader or a full disk, nothing is raised: training goes on. A
stream that nobody reads any more is given up, the other one is not.

Threads: any. One lock per stream keeps lines whole; a reader of stdout that stands still does not hold up stderr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.live import Live


@dataclass(frozen=True)
class Row:
    """Status of one group."""

    name: str
    state: str
    step: int | None
    restarts: int
    per_s: float | None
    note: str = ""


class Screen:
    """Where lines go. `start` and `close` around its use; without a terminal both do nothing."""

    def __init__(self) -> None:
        self._out = _Place(sys.stdout)
        self._err = _Place(sys.stderr)
        self._live: Live | None = None
        self._shared = False
        """stdout is a terminal too: what goes there has to keep off the status lines."""

    def __repr__(self) -> str:
        return f"Screen({'live' if self._live else 'plain'})"

    @property
    def live(self) -> bool:
        """Whether there are status lines to keep up to date."""
        return self._live is not None

    def start(self) -> None:
        """Keep status lines at the bottom, if stderr is a terminal that can move its cursor."""
        if not self._err.stream.isatty():
            return
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            self.say("no status lines: pip install rich")
            return
        console = Console(file=self._err.stream)
        if not console.is_terminal or console.is_dumb_terminal:
            return
        self._shared = self._out.stream.isatty()
        live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=self._shared, redirect_stderr=True
        )
        with self._err.lock, self._err.spoiled():
            live.start()
            self._live = live

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        with self._err.lock, self._err.spoiled():
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    def workers(self, label: str, lines: Sequence[str], err: bool) -> None:
        """Lines of one worker."""
        self._write([f"[{label}] {line}" for line in lines], err)

    def say(self, text: str, about: str = "") -> None:
        """A line of ftrun's own."""
        about = f"[{about}] " if about else ""
        self._write([f"ftrun: {about}{line}" for line in text.splitlines()], True)

    def rows(self, rows: Sequence[Row], title: str) -> None:
        """Renew the status lines."""
        if self._live is None:
            return
        from rich.table import Table
        from rich.text import Text

        # Text, not str: a note may contain what looks like markup.
        table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, expand=False)
        for column in ("group", "state", "step", "steps/s", "restarts", ""):
            table.add_column(column, justify="right" if column in ("step", "steps/s", "restarts") else "left")
        for row in rows:
            step = "-" if row.step is None else str(row.step)
            speed = "-" if row.per_s is None else f"{row.per_s:.1f}"
            table.add_row(*map(Text, (row.name, row.state, step, speed, str(row.restarts), row.note)))
        with self._err.lock, self._err.spoiled():
            if self._live is not None:
                self._live.update(table, refresh=True)

    def _write(self, lines: Sequence[str], err: bool) -> None:
        if self._live is not None and (err or self._shared):
            with self._err.lock, self._err.spoiled():
                if self._live is not None:
                    # Plain text: what workers print is not markup, and long lines are the terminal's to wrap.
                    text = self._err.escaped("\n".join(lines))
                    self._live.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
                    return
        place = self._err if err else self._out
        with place.lock, place.spoiled():
            place.write("".join(f"{line}\n" for line in lines))


class _Place:
    """A standard stream, with its lock, until nobody reads it any more."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lock = threading.Lock()
        self._gone = False

    def write(self, text: str) -> None:
        """Write and flush, as long as there is a reader."""
        if not self._gone:
            self.stream.write(self.escaped(text))
            self.stream.flush()

    def escaped(self, text: str) -> str:
        """The text with characters that the stream's encoding lacks as backslash escapes."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    @contextlib.contextmanager
    def spoiled(self) -> Iterator[None]:
        """Swallow what writing may raise: lines are lost if the disk is full, all of them once the reader is gone."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):
                return
            self._gone = True
            with contextlib.suppress(OSError, ValueError):  # else the interpreter complains about it when it ends
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.stream.fileno())
                os.close(null)
