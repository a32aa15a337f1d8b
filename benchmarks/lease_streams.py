"""Many lease streams from one process, for measuring a lighthouse: just enough of HTTP/2 and gRPC to hold them.

How it works. `Streams` has one TCP connection per simulated replica group, as real groups have, one selector for all,
and no gRPC: a message costs it some ten microseconds, so what is measured is the lighthouse and not this process. Each
connection carries one stream; it answers pings and settings, and offers windows so large that nothing has to be
returned. Pushes go to one handler, undecoded.

Threads: `Streams` is used by one thread; `turn` reads and writes for a while.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_HEADERS, ACK, PADDED = 4, 1, 8
WINDOW_MAX = 2**31 - 1
READ_BYTES = 1 << 20
SETTING_WINDOW = 4
FIRST_WINDOW = 65535


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value  # HPACK: literal, not indexed


def _opening(host: str, method: str) -> bytes:
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": method.encode(), b":authority": host.encode(),
        b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    block = b"".join(_header(name, value) for name, value in fields.items())
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, struct.pack(">HI", SETTING_WINDOW, WINDOW_MAX))
        + frame(WINDOW, 0, 0, struct.pack(">I", WINDOW_MAX - FIRST_WINDOW))
        + frame(HEADERS, END_HEADERS, 1, block)
    )


class Stream:
    """One lease stream on a connection of its own."""

    def __init__(self, number: int, streams: Streams) -> None:
        self.number = number
        self._streams = streams
        self._socket: socket.socket | None = None
        self._raw = bytearray()
        self._message = bytearray()
        self._out = bytearray()
        self._window = FIRST_WINDOW
        self._initial = FIRST_WINDOW

    @property
    def open(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._socket is not None

    def connect(self) -> None:
        """Open the connection and the stream."""
        self._raw.clear()
        self._message.clear()
        self._out.clear()
        self._window = self._initial = FIRST_WINDOW
        streams = self._streams
        self._socket = socket.create_connection((streams.host, streams.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        streams.selector.register(self._socket, selectors.EVENT_READ, self)
        self._write(_opening(f"{streams.host}:{streams.port}", streams.method))

    def close(self) -> None:
        """Close the connection, as the kernel does for a process that was killed."""
        if self._socket is not None:
            self._streams.selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def send(self, message: bytes) -> None:
        """Send one gRPC message."""
        self._window -= len(message) + 5
        assert self._window >= 0, "more was sent than the server takes at once"
        self._write(frame(DATA, 0, 1, b"\0" + struct.pack(">I", len(message)) + message))

    def _write(self, data: bytes) -> None:
        if self._socket is None:
            return
        if not self._out:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass  # later
            except ConnectionError:
                self.close()
                self._streams.ended(self)
                return
        if data:
            self._out += data
            self._streams.selector.modify(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def ready(self, mask: int) -> None:
        """The selector says that something can be read or written."""
        if self._socket is None:
            return
        if mask & selectors.EVENT_WRITE:
            del self._out[: self._socket.send(self._out)]
            if not self._out:
                self._streams.selector.modify(self._socket, selectors.EVENT_READ, self)
        if mask & selectors.EVENT_READ:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.close()
                self._streams.ended(self)
                return
            self._raw += data
            self._frames()

    def _frames(self) -> None:
        raw, at = self._raw, 0
        while len(raw) - at >= 9:
            length = int.from_bytes(raw[at : at + 3], "big")
            if len(raw) - at - 9 < length:
                break
            self._frame(raw[at + 3], raw[at + 4], raw, at + 9, length)
            at += 9 + length
            if self._socket is None:
                return
        del raw[:at]

    def _frame(self, kind: int, flags: int, raw: bytearray, at: int, length: int) -> None:
        if kind == DATA:
            padding = raw[at] + 1 if flags & PADDED else 0
            self._message += raw[at + bool(padding) : at + length - max(0, padding - 1)]
            self._messages()
        elif kind == SETTINGS and not flags & ACK:
            for place in range(at, at + length, 6):
                key, value = struct.unpack_from(">HI", raw, place)
                if key == SETTING_WINDOW:
                    self._window += value - self._initial
                    self._initial = value
            self._write(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._streams.pings += 1
            self._write(frame(PING, ACK, 0, bytes(raw[at : at + length])))
        elif kind == WINDOW:
            self._window += struct.unpack_from(">I", raw, at)[0]
        elif kind in (RESET, GOAWAY):
            self.close()
            self._streams.ended(self)

    def _messages(self) -> None:
        message, at = self._message, 0
        while len(message) - at >= 5:
            length = int.from_bytes(message[at + 1 : at + 5], "big")
            if len(message) - at - 5 < length:
                break
            self._streams.took(self, memoryview(message)[at + 5 : at + 5 + length])
            at += 5 + length
        del message[:at]


class Streams:
    """All streams of this process.

    Args:
        address: host:port of the lighthouse, an IPv4 address.
        method: path of the gRPC method.
        took: called with the stream and each push that arrives; the bytes are valid for the call only.
    """

    def __init__(self, address: str, method: str, took: Callable[[Stream, memoryview], None]) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port, self.method = host, int(port), method
        self.selector = selectors.DefaultSelector()
        self.pings = 0
        self.lost: list[Stream] = []
        """Streams that the lighthouse ended."""
        self._took = took

    def took(self, stream: Stream, push: memoryview) -> None:
        """A push arrived."""
        self._took(stream, push)
        push.release()

    def ended(self, stream: Stream) -> None:
        """The lighthouse ended a stream."""
        self.lost.append(stream)

    def turn(self, wait_s: float) -> None:
        """Read and write what can be, waiting for at most `wait_s`."""
        for key, mask in self.selector.select(max(0.0, wait_s)):
            key.data.ready(mask)

    def until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Take turns until `done`. Raises TimeoutError with `what`."""
        deadline = time.monotonic() + limit_s
        while not done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{what} took longer than {limit_s:g} s")
            self.turn(min(left_s, 0.1))
