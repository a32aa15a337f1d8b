"""The receiver's end of one HTTP connection to a donor, a `DonorLink`: requests out, verified bodies in.

Two requests may be in flight; answers come in order. What precedes the trailer (`wire`) counts for nothing until
the trailer has been read.

Threads: one worker owns the connection; only `cut()`, which wakes it, may be called from others.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote, urlsplit

from ft_core.checkpointing.donor_link import Busy, Greeting, Item, Refused, Untrusted
from ft_core.checkpointing.http import auth
from ft_core.checkpointing.http.byte_stream import HEAD_BYTES_MAX, ByteStream
from ft_core.checkpointing.http.sockets import cut, track
from ft_core.checkpointing.http.wire import BUSY, FORBIDDEN, TRAILER, TRAILER_OK, parse_fields
from ft_core.checkpointing.tensor_bytes import checksum
from ft_core.errors import ConfigError, HealError
from ft_core.tls_diagnosis import Diagnosis

if TYPE_CHECKING:
    from ft_core.certificates import Tls

WINDOW: Final = 2
"""Requests in flight per connection: hides one round trip without hoarding work."""
RETRY_S_MAX: Final = 5
"""Longest `Retry-After` that is believed."""


@dataclass(frozen=True)
class ClientTls:
    """The job's certificates, looked at once for all connections of a transfer."""

    files: Tls

    @classmethod
    def of(cls, files: Tls | None) -> ClientTls | None:
        """Look at the files. Raises ConfigError."""
        if files is None:
            return None
        files.files().look()
        return cls(files)

    @property
    def context(self) -> ssl.SSLContext:
        """Of the certificates that are in force."""
        return self.files.files().now.client


def _alert(error: ssl.SSLError) -> Exception:
    """What the donor's TLS said before it hung up."""
    if "ALERT" not in (error.reason or ""):
        return error
    return Untrusted(
        f"it does not accept this replica's certificate ({error.reason}): FT_TLS_CERT and FT_TLS_KEY have to be "
        "set, and signed by its FT_TLS_CA"
    )


class DonorConnection:
    """One HTTP connection to a donor; owned by one worker."""

    window: Final = WINDOW
    reopens: Final = True

    def __init__(self, address: str, token: str | None, tls: ClientTls | None = None, manifest: str = "") -> None:
        """`manifest`: path of what `greet` asks for."""
        parts = urlsplit(address if "//" in address else f"//{address}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise ConfigError(f"donor address must be http://host:port, got {address!r}") from e
        if host is None or port is None or parts.scheme not in ("", "http", "https"):
            raise ConfigError(f"donor address must be http://host:port, got {address!r}")
        self._encrypted = parts.scheme == "https"
        self._tls = tls
        self.address = address
        self._manifest, self._tag = manifest, ""
        self._host, self._port, self._token = host, port, token
        self._lock = threading.Lock()
        self._stream: ByteStream | None = None
        self._cut = False

    def open(self, connect_s: float, idle_s: float) -> None:
        """Connect; tries every address the host name has.

        With certificates on one of the two sides only, nothing is sent: `Untrusted`.
        """
        if self._encrypted and self._tls is None:
            raise Untrusted("it uses TLS, and no certificates are set here: set FT_TLS_CA, FT_TLS_CERT and FT_TLS_KEY")
        if self._tls is not None and not self._encrypted:
            raise Untrusted("it does not use TLS, and FT_TLS_* are set here: set them there too, or unset them here")
        error: OSError = OSError(f"{self._host} has no address")
        end = time.monotonic() + connect_s
        for family, kind, proto, _, where in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            self.close()
            sock = socket.socket(family, kind, proto)
            if self._tls is not None:
                sock = self._tls.context.wrap_socket(
                    sock, server_hostname=self._host, do_handshake_on_connect=False, suppress_ragged_eofs=True
                )
            with self._lock:
                self._stream = ByteStream(sock)
                if self._cut:
                    raise OSError("cancelled")
            track(sock)
            try:
                sock.settimeout(max(0.001, end - time.monotonic()))
                sock.connect(where)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._handshake(idle_s)
                self.set_idle(idle_s)
            except OSError as e:
                error = e
                continue
            return
        raise error

    def _handshake(self, within_s: float) -> None:
        """`within_s` is long: a server whose places are taken shakes hands when it has one."""
        stream = self._open_stream()
        try:
            stream.handshake(within_s)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError):
            if self._cut:
                raise
            raise Busy(RETRY_S_MAX / 2) from None  # it cannot tell why without keys
        except ssl.SSLError as e:
            assert self._tls is not None
            advice = Diagnosis(self._tls.files, self._host, self._port).advice(str(e))
            if advice:
                raise Untrusted(advice) from e
            raise HealError(f"no TLS connection: {e.reason or e}") from e

    def set_idle(self, idle_s: float) -> None:
        """From now on, give up after `idle_s` without a byte."""
        self._open_stream().set_idle(idle_s, idle_s)

    def cut(self) -> None:
        """From any thread: wake the worker, whose calls then fail. The fd stays, because the worker may be using it."""
        with self._lock:
            self._cut = True
            if self._stream is not None:
                cut(self._stream.sock)

    def close(self) -> None:
        """Let go of the socket."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            cut(stream.sock)
            stream.sock.close()

    def _open_stream(self) -> ByteStream:
        assert self._stream is not None
        return self._stream

    def request(self, target: str) -> None:
        """Send one GET."""
        lines = [f"GET {target} HTTP/1.1", f"Host: {self._host}:{self._port}"]
        if self._token is not None:
            lines.append(f"Authorization: {auth.sign(self._token, 'GET', target)}")
        stream = self._open_stream()
        try:
            stream.send(["\r\n".join([*lines, "", ""]).encode("ascii")])
        except BlockingIOError:
            raise
        except OSError as error:
            # Who refuses a certificate does so after the keys were agreed on (TLS 1.3): the reason came before its end.
            try:
                stream.receive(memoryview(bytearray(1)))
            except ssl.SSLError as reason:
                raise _alert(reason) from None
            except OSError:
                raise error from None
            raise

    def head(self) -> tuple[int, dict[str, str]]:
        """Read a response head: body length and headers. Any status but 200 is raised as `Refused`."""
        try:
            text = self._open_stream().head()
        except ssl.SSLError as error:
            raise _alert(error) from error
        if text == b"":
            raise OSError("the donor closed the connection")
        try:
            lines = (text or b"").decode("latin-1").split("\r\n")
            fields = parse_fields(lines[1:])
            status, length = int(lines[0].split(" ")[1]), int(fields["content-length"])
        except (ValueError, IndexError, KeyError) as e:
            raise HealError("the answer is not of the healing protocol") from e
        if status != 200:
            reason = bytearray(min(max(length, 0), HEAD_BYTES_MAX))
            self.receive(memoryview(reason))
            if status == BUSY:
                raise Busy(_seconds(fields.get("retry-after", "")))
            why = f"{status}: {reason.decode('utf-8', 'replace').strip()}"
            raise Untrusted(why) if status == FORBIDDEN else Refused(status, why)
        if length < TRAILER.size:
            raise HealError("the answer is too short")
        return length - TRAILER.size, fields

    def receive(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the answer."""
        self._open_stream().receive(target)

    def trailer(self) -> int:
        """Read the trailer: the donor's confirmation that the body is of an open offer, and its checksum."""
        data = bytearray(TRAILER.size)
        self.receive(memoryview(data))
        magic, value = TRAILER.unpack(data)
        if magic != TRAILER_OK:
            raise HealError("the answer does not end as the healing protocol says")
        return int(value)

    def greet(self, wait_s: float, bytes_max: int) -> Greeting:
        """The manifest, and the tag that ranges are asked for under: a live offer's is the donor's choice."""
        self.request(f"{self._manifest}?wait_ms={max(1, int(wait_s * 1000))}")
        body, headers = self.small_body(bytes_max)
        self._tag = unquote(headers.get("x-ft-tag", ""))
        return Greeting(self._tag, headers.get("x-ft-layout", ""), body)

    def ask(self, item: Item, target: memoryview | None) -> None:
        """Send the request for an item."""
        del target
        what = f"sums?first={item.first}&count={item.count}" if item.count else f"range/{item.first}"
        self.request(f"/state/{quote(self._tag, safe='')}/{what}")

    def sums(self, count: int) -> bytearray:
        """Read and verify an answer of checksums."""
        length, _ = self.head()
        if length != 8 * count:
            raise HealError(f"{count} checksums came as {length} bytes")
        body = bytearray(length)
        self.receive(memoryview(body))
        if self.trailer() != checksum(body):
            raise HealError("the checksum of an answer does not match")
        return body

    def range(self, target: memoryview) -> int:
        """Read a range into `target`; the caller compares the checksum."""
        length, _ = self.head()
        if length != len(target):
            raise HealError(f"a range has {length} bytes instead of {len(target)}")
        self.receive(target)
        return self.trailer()

    def small_body(self, limit: int) -> tuple[bytearray, dict[str, str]]:
        """Read and verify a whole answer."""
        length, headers = self.head()
        if length > limit:
            raise HealError(f"the answer has {length} bytes, the limit is {limit}")
        body = bytearray(length)
        self.receive(memoryview(body))
        if self.trailer() != checksum(body):
            raise HealError("the checksum of an answer does not match")
        return body, headers


def _seconds(text: str) -> float:
    return float(min(max(int(text), 0), RETRY_S_MAX)) if text.isdecimal() else float(RETRY_S_MAX)
