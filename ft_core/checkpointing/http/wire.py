"""The bytes both ends agree on: request heads, response heads, and the trailer.

Plain HTTP/1.1 with GET, Content-Length and keep-alive, so that curl and proxies understand it; parsed by hand because
the standard library's parser costs more per request than the request itself, with the GIL held.

Every 200 body ends with a trailer, counted in Content-Length: `FTOK` and the checksum of what went before. It is the
donor's confirmation that the bytes are of an open offer; without it the receiver throws them away. (A range of a live
offer has checksum 0: its memory may change between any two looks at it.)
"""

from __future__ import annotations

import http
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ft_core.checkpointing.http.byte_stream import ByteStream

TRAILER: Final = struct.Struct("<4sQ")
TRAILER_OK: Final = b"FTOK"
UNSENDABLE: Final = 422
"""Status of an offer that was to be made and could not be: the donor's state holds what cannot be sent."""
FORBIDDEN: Final = 403
"""Status for who has no token, or another one."""
BUSY: Final = 503
"""Status of a server that has no room even for one more that waits; `Retry-After` says when to come again."""
_REASONS: Final = {status.value: status.phrase for status in http.HTTPStatus}


class Refusal(Exception):
    """An answer other than 200, on the side that gives it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Cut(Exception):
    """The connection has to end without an answer: the offer was closed under it."""


class NotYet(Exception):
    """What was asked for is not there, and may come within `wait_s`. `tag` None: a live offer."""

    def __init__(self, tag: str | None, wait_s: float, refusals: int = 0) -> None:
        super().__init__(tag)
        self.tag = tag
        self.wait_s = wait_s
        self.refusals = refusals
        """How many live offers had been refused by then."""


@dataclass(slots=True)
class Request:
    """What the server looks at in a request."""

    method: str
    target: str
    authorization: str | None


def read_request(stream: ByteStream, within_s: float | None) -> Request | None:
    """The next request; None at the end of the connection, and after garbage was answered."""
    text = stream.head(within_s)
    if text == b"":
        return None
    request = _parse_request(text) if text is not None else None
    if request is None:
        body = b"not a request of the ft-training healing protocol\n"
        stream.send([head(400, len(body)), body])
    return request


def _parse_request(text: bytes) -> Request | None:
    lines = text.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return None
    fields = parse_fields(lines[1:])
    if fields.get("content-length", "0") != "0" or "transfer-encoding" in fields:
        return None
    return Request(words[0], words[1], fields.get("authorization"))


def parse_fields(lines: list[str]) -> dict[str, str]:
    """Header lines as a dict with lower-case names."""
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def head(status: int, length: int, extra: str = "") -> bytes:
    """A response head; `extra` are whole header lines."""
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {length}\r\n{extra}\r\n".encode("ascii")
