"""`Feed`: hands the newest page to every browser that watches; nobody is waited for.

How it works. Each `Reader` has place for one message. If that is still there when the next one comes, the browser is
behind: it gets the whole page instead, once it reads on. So a slow browser sees fewer pages, never an old one, and what
is kept for it does not grow.

Invariants: at most READERS_MAX readers; one message per reader. Everything runs on the dashboard's loop.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from ft_core.dashboard.model import changes

if TYPE_CHECKING:
    from ft_core.dashboard.model import Model

READERS_MAX = 64
"""Browsers that watch at the same time."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Reader:
    """One browser."""

    def __init__(self) -> None:
        self._message: bytes | None = None
        self._wake = asyncio.Event()
        self._over = False

    def __repr__(self) -> str:
        return f"Reader({'behind' if self.behind else 'up to date'})"

    @property
    def behind(self) -> bool:
        """The last message has not been taken."""
        return self._message is not None

    def put(self, message: bytes) -> None:
        """Hand it a message, in place of the last one if that is still there."""
        self._message = message
        self._wake.set()

    def end(self) -> None:
        """`next` returns None from now on."""
        self._over = True
        self._wake.set()

    async def next(self) -> bytes | None:
        """The next message; None: the feed has ended."""
        await self._wake.wait()
        if self._over:
            return None
        self._wake.clear()
        message, self._message = self._message, None
        return message


class Feed:
    """All browsers that watch."""

    def __init__(self) -> None:
        self.readers: set[Reader] = set()
        self._sent: Model | None = None
        """The page that readers have that are not behind."""

    def __repr__(self) -> str:
        return f"Feed({len(self.readers)} readers)"

    def open(self, page: Model) -> Reader | None:
        """A reader that is sent this page first; None: there are too many."""
        if len(self.readers) >= READERS_MAX:
            return None
        reader = Reader()
        self.readers.add(reader)
        if self._sent is None:
            self._sent = page
        reader.put(message("page", self._sent))
        return reader

    def close(self, reader: Reader) -> None:
        """This one has gone."""
        self.readers.discard(reader)
        if not self.readers:
            self._sent = None

    def publish(self, page: Model) -> None:
        """Send the newest page to all."""
        if not self.readers:
            return
        change = whole = None
        for reader in self.readers:
            if reader.behind or self._sent is None:
                whole = whole or message("page", page)
                reader.put(whole)
            else:
                change = change or message("change", changes(self._sent, page))
                reader.put(change)
        self._sent = page

    def end(self) -> None:
        """The dashboard closes."""
        for reader in self.readers:
            reader.end()


def encode(value: object, deep: int = 4) -> bytes:
    """A page as JSON. In small pieces: nobody else in this process runs while one is encoded (a thousand replicas)."""
    if deep and isinstance(value, dict):
        return b"{%s}" % b",".join(b"%s:%s" % (_piece(name), encode(of, deep - 1)) for name, of in value.items())
    if deep and isinstance(value, list):
        return b"[%s]" % b",".join([encode(of, deep - 1) for of in value])
    return _piece(value)


def _piece(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def message(kind: str, page: Model) -> bytes:
    """A server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(page))
