"""The bytes both ends agree on: request heads, response heads, and the trailer.

Plain HTTP/1.1 with GET, Content-Length and keep-alive, so that curl and proxies understand it; parsed by hand because
the standard library's parser costs more per request than the request itself, with the GIL held.

Every 200 body ends with a trailer, counted in Content-Length: `FTOK` and the checksum of what went before. It is the
donor's word that the bytes are of an open offer; without it the receiver throws them away. (A range of a live offer
has checksum 0: its memory may change between any two looks at it.)
"""

from __future__ import annotations

import http
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Final

HEAD_BYTES_MAX: Final = 8192
TRAILER: Final = struct.Struct("<4sI")
TRAILER_OK: Final = b"FTOK"
UNSENDABLE: Final = 422
"""Status of an offer that was to be made and could not be: the donor's state holds what cannot be sent."""
_REASONS: Final = {status.value: status.phrase for status in http.HTTPStatus}


class Refusal(Exception):
    """An answer other than 200, on the side that gives it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Cut(Exception):
    """The connection has to end without an answer: the offer was closed under it."""


@dataclass(slots=True)
class ByteStream:
    """A socket, and what was read from it beyond the last head."""

    sock: socket.socket
    buffer: bytearray = field(default_factory=bytearray)

    def head(self, within_s: float | None = None) -> bytes | None:
        """The next head without its blank line; b"" at the end of the stream, None if what comes is not a head."""
        end = None if within_s is None else time.monotonic() + within_s
        while (stop := self.buffer.find(b"\r\n\r\n")) < 0:
            if len(self.buffer) > HEAD_BYTES_MAX or (end is not None and time.monotonic() > end):
                return None
            data = self.sock.recv(HEAD_BYTES_MAX)
            if not data:
                return b""
            self.buffer += data
        found = bytes(self.buffer[:stop])
        del self.buffer[: stop + 4]
        return found

    def receive(self, target: memoryview) -> None:
        """Fill `target`; one system call if all goes well."""
        ready = min(len(self.buffer), len(target))
        if ready:
            target[:ready] = self.buffer[:ready]
            del self.buffer[:ready]
        while ready < len(target):
            got = self.sock.recv_into(target[ready:], 0, socket.MSG_WAITALL)
            if got == 0:
                raise OSError("the donor closed the connection in the middle of an answer")
            ready += got


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
        send(stream.sock, [head(400, len(body)), body])
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


def send(sock: socket.socket, pieces: list[bytes | memoryview]) -> None:
    """Send all pieces with as few system calls as the kernel allows; each runs without the GIL."""
    views = [memoryview(piece) for piece in pieces]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]
