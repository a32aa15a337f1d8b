"""One end of a connection: whole heads, whole bodies, few and large system calls; in clear or over TLS.

Over TLS the kernel's timeouts do not work (OpenSSL would try again), so Python's are used, and pieces are smaller: a
record holds 16 KiB, and each is a call when it is received.

Threads: one at a time; `sockets.cut` on the socket from any other wakes it.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from typing import Final

from ft_core.checkpointing.http.sockets import set_timeouts

HEAD_BYTES_MAX: Final = 8192
HEAD_S: Final = 5.0
"""A head that has begun must be complete after this: nobody needs longer but who drips."""
TLS_PIECE: Final = 256 << 10
"""Bytes encrypted per call: what is sent can be counted, and the GIL is needed between two of them only."""
TICK_S: Final = 1.0
"""A send looks up this often, to count what the peer has taken so far."""


class Meter:
    """How much the peer has taken since it was its turn; read by other threads."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.moved = 0

    def begin(self) -> None:
        """It is the peer's turn: to send a head, or to take what is sent."""
        self.moved = 0
        self.began = time.monotonic()

    def end(self) -> None:
        """It is this side's turn."""
        self.began = None


class ByteStream:
    """A socket, and what was read from it beyond the last head."""

    def __init__(self, sock: socket.socket, meter: Meter | None = None) -> None:
        self.sock = sock
        self._meter = meter if meter is not None else Meter()
        self._buffer = bytearray()
        self._receive_s = self._send_s = 0.0

    def set_idle(self, receive_s: float, send_s: float) -> None:
        """From now on give up after so long without a byte, with a BlockingIOError."""
        self._receive_s, self._send_s = receive_s, send_s
        if not isinstance(self.sock, ssl.SSLSocket):
            set_timeouts(self.sock, receive_s=receive_s, send_s=min(send_s, TICK_S))

    def handshake(self, within_s: float) -> None:
        """Agree on keys, if this is a TLS connection. Raises OSError."""
        if isinstance(self.sock, ssl.SSLSocket):
            self._meter.begin()
            self.sock.settimeout(within_s)
            self.sock.do_handshake()
            self._meter.end()

    def head(self, within_s: float | None = None) -> bytes | None:
        """The next head without its blank line; b"" at the end of the stream, None if what comes is not a head.

        `within_s`: from now; a head that has begun has `HEAD_S` anyway.
        """
        end = None if within_s is None else time.monotonic() + within_s
        self._meter.begin()
        while (stop := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_BYTES_MAX or (end is not None and time.monotonic() > end):
                return None
            data = bytearray(HEAD_BYTES_MAX)
            got = self._receive_into(memoryview(data), 0)
            if not got:
                return b""
            self._buffer += data[:got]
            if not self._buffer[:1].isalpha():
                return None  # a TLS hello, for example, whose sender would wait for an answer
            end = time.monotonic() + HEAD_S if end is None else end
        found = bytes(self._buffer[:stop])
        del self._buffer[: stop + 4]
        self._meter.end()
        return found

    def receive(self, target: memoryview) -> None:
        """Fill `target`; one system call if all goes well."""
        ready = min(len(self._buffer), len(target))
        if ready:
            target[:ready] = self._buffer[:ready]
            del self._buffer[:ready]
        while ready < len(target):
            got = self._receive_into(target[ready:], socket.MSG_WAITALL)
            if got == 0:
                raise OSError("the donor closed the connection in the middle of an answer")
            ready += got

    def _receive_into(self, target: memoryview, flags: int) -> int:
        if not isinstance(self.sock, ssl.SSLSocket):
            return self.sock.recv_into(target, 0, flags)
        if self.sock.gettimeout() != self._receive_s:
            self.sock.settimeout(self._receive_s)
        try:
            return self.sock.recv_into(target)
        except TimeoutError:
            raise BlockingIOError(errno.EAGAIN, "nothing came") from None

    def _send_some(self, views: list[memoryview]) -> int:
        if not isinstance(self.sock, ssl.SSLSocket):
            return self.sock.sendmsg(views)
        if self.sock.gettimeout() != min(self._send_s, TICK_S):
            self.sock.settimeout(min(self._send_s, TICK_S))
        try:
            return self.sock.send(views[0][:TLS_PIECE])
        except TimeoutError:  # the same bytes have to come next time, and do
            raise BlockingIOError(errno.EAGAIN, "nothing was taken") from None

    def send(self, pieces: list[bytes | memoryview]) -> None:
        """Send all pieces with as few system calls as the kernel allows; each runs without the GIL."""
        views = [memoryview(piece) for piece in pieces if len(piece)]
        end = time.monotonic() + self._send_s
        self._meter.begin()
        while views:
            try:
                sent = self._send_some(views)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                continue
            self._meter.moved += sent
            end = time.monotonic() + self._send_s
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
        self._meter.end()
