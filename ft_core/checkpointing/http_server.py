"""The donor's side of healing: serves offered state by byte range, straight from live memory.

What it answers (HTTP/1.1, GET only; `curl -v http://host:port/` gives a hint)
    /state/<tag>/manifest?wait_ms=N      skeleton and leaf list of the offer; waits up to N ms for it to be made
    /state/<tag>/range/<i>               the bytes of range i
    /state/<tag>/sums?first=a&count=n    n little-endian u32 checksums of ranges a...
    /prefetch?wait_ms=N                  manifest of a *live* offer (tag in X-FT-Tag), made by the training thread
    /blob/<name>                         small answers others register (`add_blob`)
Every 200 body ends with an 8-byte trailer, counted in Content-Length: `FTOK` and the checksum of what went before. The
trailer is the donor's word that the bytes are of this offer; without it the receiver throws them away.

How a donor never serves torn state: tensors are held by reference, and the owner calls `close(tag)` right before
optimizer.step changes them. close() marks the offer closed under the lock and cuts the connections that are sending
it. A sender decides under the same lock, *after* its last byte went to the kernel, whether the offer is still open,
and only then sends the trailer. So a trailer proves that every byte was read before close() returned. close() never
waits for a socket: the lock is only ever held for bookkeeping.

A live offer is the same without the guarantee: nobody closes it when tensors change, what is received may be torn, and
receivers treat it as a guess to be compared later (`http_client.prefetch`).

Sparing the trainer: threads spend their time in sendmsg and crc32, which release the GIL, in pieces of megabytes
(`sockets` says why the sockets are blocking). Checksums run on at most two threads at a time.

Threads: `ft-heal-accept` owns the listener and drops idle live offers; one `ft-heal-conn` per connection (bounded). The
training thread calls offer, offer_live, close and reads `snapshot_wanted`. All shared state is guarded by `_lock`
(`_changed` is its condition). Nothing is called out to and nothing blocks while it is held.
"""

from __future__ import annotations

import contextlib
import http
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ft_core.checkpointing import auth
from ft_core.checkpointing.memory import ChecksumCache, checksum
from ft_core.checkpointing.offer import Offer
from ft_core.checkpointing.sockets import cut, set_timeouts, track
from ft_core.errors import ConfigError, UsageError
from ft_core.net import advertised_host

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 32
OFFERS_MAX: Final = 4
"""Offers open at once (state, and the reduced buckets of attempts); one more closes the oldest."""
CLOSED_TAGS_MAX: Final = 64
BLOBS_MAX: Final = 64
HEAD_BYTES_MAX: Final = 8192
HEAD_S: Final = 5.0
"""A connection that has not finished its first request head after this is cut."""
KEEPALIVE_S: Final = 30.0
WAIT_S_MAX: Final = 60.0
"""Longest a request may wait for an offer to appear."""
LIVE_IDLE_S: Final = 10.0
"""A live offer nobody asked for this long is dropped, so that replaced tensors do not stay alive."""
CHECKSUM_THREADS_MAX: Final = 2
TRAILER: Final = struct.Struct("<4sI")
TRAILER_OK: Final = b"FTOK"
_LIVE_PREFIX: Final = "live-"
_REASONS: Final = {status.value: status.phrase for status in http.HTTPStatus}


class _Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Cut(Exception):
    """The connection has to end without an answer: the offer was closed under it."""


@dataclass(slots=True)
class _Request:
    method: str
    target: str
    authorization: str | None


class _Connection:
    """One receiver's connection. `trusted` once a request of it authenticated; guarded by the server's lock."""

    __slots__ = ("buffer", "sock", "thread", "trusted")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()
        self.trusted = False
        self.thread: threading.Thread | None = None


class StateServer:
    """Serves offered state to healing peers. `start()` opens the port; see the file header."""

    snapshot_wanted: bool
    """A newcomer waits for a live offer: call `offer_live` at the next step boundary. Cheap to read every step."""

    def __init__(self, token: str | None = None, *, bind: str = "", hostname: str | None = None, port: int = 0) -> None:
        """`bind`: address to listen on ("" = all interfaces). `hostname`: what peers are told to connect to."""
        if token == "":
            raise ConfigError("token must not be an empty string; unset FT_TOKEN or give it a value")
        self._token = token
        self._bind = bind
        self._hostname = hostname
        self._port = port
        self.snapshot_wanted = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._offers: dict[str, Offer] = {}  # open ones, oldest first, at most OFFERS_MAX
        self._closed_tags: dict[str, None] = {}  # newest CLOSED_TAGS_MAX, so that a late request learns why
        self._live: Offer | None = None
        self._live_count = 0
        self._waiting_for_live = 0
        self._blobs: dict[str, Callable[[], bytes | None]] = {}
        self._connections: set[_Connection] = set()
        self._sums = ChecksumCache()
        self._checksum_slots = threading.BoundedSemaphore(CHECKSUM_THREADS_MAX)
        self._listener: socket.socket | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._address = ""

    def __repr__(self) -> str:
        with self._lock:
            state = "stopped" if self._stopped else "listening" if self._listener else "new"
            tags = [*self._offers, *([self._live.tag] if self._live else [])]
            where = self._address or "no address"
            return f"StateServer({where}, {state}, offers={tags}, {len(self._connections)} connections)"

    # -- life cycle

    def start(self) -> StateServer:
        """Listen. `ConfigError` if the address cannot be bound."""
        if self._listener is not None or self._stopped:
            raise UsageError("StateServer.start() may be called once")
        self._listener = self._listen()
        self._wake = socket.socketpair()
        for sock in (self._listener, *self._wake):
            track(sock)
        bound = self._bind if self._bind not in ("", "::", "0.0.0.0") else None
        host = advertised_host(self._hostname or bound, None)
        port = self._listener.getsockname()[1]
        self._address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._thread = threading.Thread(target=self._accept_loop, name="ft-heal-accept", daemon=True)
        self._thread.start()
        return self

    def _listen(self) -> socket.socket:
        try:
            if self._bind in ("", "::") and socket.has_dualstack_ipv6():
                with contextlib.suppress(OSError):
                    return socket.create_server(
                        ("", self._port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=CONNECTIONS_MAX
                    )
            family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
            bind = "" if self._bind == "::" else self._bind
            return socket.create_server((bind, self._port), family=family, backlog=CONNECTIONS_MAX)
        except OSError as e:
            where = f"bind={self._bind!r}, port={self._port}: {e}"
            raise ConfigError(f"cannot listen for healing peers on {where}; choose another address or port 0") from e

    @property
    def address(self) -> str:
        """`http://host:port`, what peers pass to `fetch`."""
        if not self._address:
            raise UsageError("StateServer.address is known after start()")
        return self._address

    def shutdown(self) -> None:
        """Stop serving, cut every connection, end all threads. Idempotent, bounded in time."""
        with self._lock:
            first = not self._stopped
            self._stopped = True
            for offer in (*self._offers.values(), *([self._live] if self._live else [])):
                offer.closed = True
            self._offers.clear()
            self._live = None
            self.snapshot_wanted = False
            connections = list(self._connections)
            self._changed.notify_all()
        if not first:
            return
        for connection in connections:
            cut(connection.sock)
        self._wake_up()
        end = time.monotonic() + 2.0
        for thread in (self._thread, *(c.thread for c in connections)):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        for sock in (self._listener, *(self._wake or ())):
            if sock is not None:
                sock.close()

    # -- what the training thread calls

    def offer(self, tag: str, state: object, *, copy_storages: Container[int] = ()) -> None:
        """Serve `state` under `tag` until `close(tag)`, which must be called before any of its tensors changes.

        Tensors are served from where they lie. Copied now: leaves up to 64 KiB, leaves whose
        `untyped_storage().data_ptr()` is in `copy_storages` (what forward changes), CUDA and non-contiguous tensors.
        Raises `EncodingError` naming the key path of what cannot be sent.
        """
        if not tag or tag.startswith(_LIVE_PREFIX):
            raise ConfigError(f"offer tag must not be empty or start with {_LIVE_PREFIX!r}, got {tag!r}")
        offer = Offer(tag, state, copy_storages)
        with self._lock:
            if self._stopped:
                raise UsageError("StateServer.offer() after shutdown()")
            senders = self._drop(tag)
            while len(self._offers) >= OFFERS_MAX:
                senders += self._drop(next(iter(self._offers)))
            self._offers[tag] = offer
            self._closed_tags.pop(tag, None)
            self._changed.notify_all()
        for sock in senders:
            cut(sock)

    def offer_live(self, state: object) -> None:
        """Answer `snapshot_wanted`: let newcomers read `state` as it is and as it changes. Copies small leaves only."""
        with self._lock:
            self.snapshot_wanted = False  # first, so that a state that cannot be encoded is reported once
            self._live_count += 1
            tag = f"{_LIVE_PREFIX}{self._live_count}"
        offer = Offer(tag, state, live=True)
        with self._lock:
            if self._stopped:
                return
            self.snapshot_wanted = False
            offer.last_used_s = time.monotonic()
            self._live = offer
            self._changed.notify_all()
        self._wake_up()

    def close(self, tag: str) -> None:
        """From now on nothing of `tag` is served: what was being sent will not verify. Returns without waiting."""
        with self._lock:
            senders = self._drop(tag)
        for sock in senders:
            cut(sock)

    def close_all(self) -> None:
        """`close` every offer (live ones, which promise nothing, stay)."""
        with self._lock:
            senders = [sock for tag in list(self._offers) for sock in self._drop(tag)]
        for sock in senders:
            cut(sock)

    def drop_live(self) -> None:
        """Stop serving the live offer now, for example before its memory goes away."""
        with self._lock:
            live, self._live = self._live, None
            senders = []
            if live is not None:
                live.closed = True
                senders = list(live.sending)
        for sock in senders:
            cut(sock)

    def open_tags(self) -> list[str]:
        """Tags of the open offers, oldest first."""
        with self._lock:
            return list(self._offers)

    def add_blob(self, name: str, provider: Callable[[], bytes | None]) -> None:
        """Answer `/blob/<name>` with what `provider` returns (None: 404). It runs on a connection thread; be quick."""
        with self._lock:
            if name not in self._blobs and len(self._blobs) >= BLOBS_MAX:
                raise UsageError(f"more than {BLOBS_MAX} blobs")
            self._blobs[name] = provider

    def _drop(self, tag: str) -> list[socket.socket]:
        """Under the lock: close the offer; returns the sockets to cut after releasing it."""
        offer = self._offers.pop(tag, None)
        if offer is None:
            return []
        offer.closed = True
        self._closed_tags[tag] = None
        while len(self._closed_tags) > CLOSED_TAGS_MAX:
            del self._closed_tags[next(iter(self._closed_tags))]
        return list(offer.sending)

    # -- the accept thread

    def _wake_up(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):
                self._wake[1].send(b"x")

    def _accept_loop(self) -> None:
        listener, wake = self._listener, self._wake
        assert listener is not None
        assert wake is not None
        listener.setblocking(False)
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(wake[0], select.POLLIN)
        while not self._stopped:
            try:
                events = dict(poller.poll(self._expire_live()))
                if wake[0].fileno() in events:
                    wake[0].recv(4096)
                if listener.fileno() in events:
                    sock, _ = listener.accept()
                    self._admit(sock)
            except BlockingIOError:
                continue
            except OSError as e:
                if self._stopped:
                    return
                # Out of fds, or a connection that died in the queue: other peers must still be served.
                logger.warning("healing port %s: accept failed: %s", self._address, e)
                time.sleep(0.05)

    def _expire_live(self) -> float | None:
        """Drop the live offer if it is idle; else the milliseconds until it may be."""
        with self._lock:
            if self._live is None:
                return None
            left_s = self._live.last_used_s + LIVE_IDLE_S - time.monotonic()
            if left_s > 0 or self._live.sending:
                return max(left_s, 0.1) * 1000
            self._live.closed = True
            self._live = None
            return None

    def _admit(self, sock: socket.socket) -> None:
        track(sock)
        connection = _Connection(sock)
        victim: _Connection | None = None
        with self._lock:
            if len(self._connections) >= CONNECTIONS_MAX:
                # Strangers must not keep peers out: the newcomer takes the place of one that never authenticated.
                victim = next((c for c in self._connections if not c.trusted), connection)
            if victim is not connection and not self._stopped:
                self._connections.add(connection)
            else:
                victim = connection
        if victim is not None:
            cut(victim.sock)
        if victim is connection:
            sock.close()
            return
        connection.thread = threading.Thread(
            target=self._serve_connection, args=(connection,), name="ft-heal-conn", daemon=True
        )
        try:
            connection.thread.start()
        except RuntimeError as e:  # the process is out of threads
            connection.thread = None
            with self._lock:
                self._connections.discard(connection)
            sock.close()
            logger.warning("healing port %s: cannot serve a connection: %s", self._address, e)

    # -- connection threads

    def _serve_connection(self, connection: _Connection) -> None:
        sock = connection.sock
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_timeouts(sock, receive_s=HEAD_S, send_s=KEEPALIVE_S)
            while not self._stopped:
                request = _read_request(connection)
                if request is None or not self._answer(connection, request):
                    return
        except (OSError, _Cut):
            pass  # the receiver notices by itself, and re-plans
        except Exception:
            logger.exception("healing port %s: request failed", self._address)
        finally:
            with self._lock:
                self._connections.discard(connection)
            # Before close(): a peer with unread bytes in flight then gets an orderly end instead of a reset.
            cut(sock)
            sock.close()

    def _answer(self, connection: _Connection, request: _Request) -> bool:
        """Answer one request; False ends the connection."""
        sock = connection.sock
        try:
            if request.method != "GET":
                raise _Refused(405, "only GET is served here")
            if self._token is not None and not auth.verify(
                self._token, request.method, request.target, request.authorization
            ):
                raise _Refused(403, "token missing or wrong: FT_TOKEN must be the same for all replicas of a job")
            if not connection.trusted:
                with self._lock:
                    connection.trusted = True
                set_timeouts(sock, receive_s=KEEPALIVE_S, send_s=KEEPALIVE_S)
            self._route(sock, request)
        except _Refused as e:
            body = f"{e}\n".encode()
            _send(sock, [_head(e.status, len(body)), body])
            return e.status in (404, 410)
        return True

    def _route(self, sock: socket.socket, request: _Request) -> None:
        try:
            url = urlsplit(request.target)
            parts = [unquote(part) for part in url.path.split("/")[1:]]
            query = {name: int(values[0]) for name, values in parse_qs(url.query).items()}
            if parts == ["prefetch"]:
                return self._send_manifest(sock, self._wait_for_live(query.get("wait_ms", 0) / 1000))
            if len(parts) == 2 and parts[0] == "blob":
                return self._send_blob(sock, parts[1])
            if len(parts) >= 3 and parts[0] == "state":
                if parts[2] == "manifest":
                    return self._send_manifest(sock, self._find(parts[1], query.get("wait_ms", 0) / 1000))
                if parts[2] == "range" and len(parts) == 4:
                    return self._send_range(sock, self._find(parts[1]), int(parts[3]))
                if parts[2] == "sums":
                    return self._send_sums(sock, self._find(parts[1]), query["first"], query["count"])
        except (ValueError, KeyError) as e:
            raise _Refused(400, f"bad request: {e!r}") from e
        raise _Refused(404, "this is the healing port of an ft-training replica; there is nothing at this path")

    def _find(self, tag: str, wait_s: float = 0.0) -> Offer:
        end = time.monotonic() + min(max(wait_s, 0.0), WAIT_S_MAX)
        with self._changed:
            while True:
                live = self._live
                if live is not None and live.tag == tag:
                    live.last_used_s = time.monotonic()
                    return live
                offer = self._offers.get(tag)
                if offer is not None:
                    return offer
                if tag in self._closed_tags or tag.startswith(_LIVE_PREFIX) or self._stopped:
                    raise _Refused(410, f"the offer {tag!r} was closed: the donor went on to its next step")
                left = end - time.monotonic()
                if left <= 0:
                    raise _Refused(404, f"there is no offer {tag!r} here (open: {', '.join(self._offers) or 'none'})")
                self._changed.wait(left)

    def _wait_for_live(self, wait_s: float) -> Offer:
        end = time.monotonic() + min(max(wait_s, 0.0), WAIT_S_MAX)
        with self._changed:
            self._waiting_for_live += 1
            try:
                while self._live is None:
                    left = end - time.monotonic()
                    if left <= 0 or self._stopped:
                        raise _Refused(404, "no live state within the wait: the donor reached no step boundary")
                    self.snapshot_wanted = True
                    self._changed.wait(left)
                self._live.last_used_s = time.monotonic()
                return self._live
            finally:
                self._waiting_for_live -= 1
                if not self._waiting_for_live:
                    self.snapshot_wanted = False

    def _send_blob(self, sock: socket.socket, name: str) -> None:
        with self._lock:
            provider = self._blobs.get(name)
        body = provider() if provider is not None else None
        if body is None:
            raise _Refused(404, f"there is no blob {name!r} here")
        _send(sock, [_head(200, len(body) + TRAILER.size), body, TRAILER.pack(TRAILER_OK, checksum(body))])

    def _send_manifest(self, sock: socket.socket, offer: Offer) -> None:
        body = offer.manifest()
        extra = f"X-FT-Tag: {quote(offer.tag, safe='')}\r\nX-FT-Layout: {offer.digest}\r\n"
        with self._sending(offer, sock) as seal:
            _send(sock, [_head(200, len(body) + TRAILER.size, extra), body])
            seal()
        _send(sock, [TRAILER.pack(TRAILER_OK, checksum(body))])

    def _send_range(self, sock: socket.socket, offer: Offer, index: int) -> None:
        if not 0 <= index < len(offer.ranges):
            raise _Refused(400, f"range {index} of {len(offer.ranges)}")
        with self._sending(offer, sock) as seal:
            value, view = self._checksum(offer, index)
            _send(sock, [_head(200, len(view) + TRAILER.size), view])
            seal()
        _send(sock, [TRAILER.pack(TRAILER_OK, value)])

    def _send_sums(self, sock: socket.socket, offer: Offer, first: int, count: int) -> None:
        if not 0 <= first < first + count <= len(offer.ranges):
            raise _Refused(400, f"ranges {first}+{count} of {len(offer.ranges)}")
        with self._sending(offer, sock) as seal:
            values = [self._checksum(offer, index)[0] for index in range(first, first + count)]
            seal()
        body = struct.pack(f"<{count}I", *values)
        _send(sock, [_head(200, len(body) + TRAILER.size), body, TRAILER.pack(TRAILER_OK, checksum(body))])

    def _checksum(self, offer: Offer, index: int) -> tuple[int, memoryview]:
        owner, view = offer.view(index)
        with self._checksum_slots:
            if offer.closed or not offer.intact(index):
                raise _Cut
            part = offer.ranges[index]
            # Remembering costs two extra passes; it pays only for state that will be asked for again: a prefetch's.
            remember = offer.live and part.leaf is not None
            return self._sums.compute(owner, part.start, view, remember=remember), view

    @contextlib.contextmanager
    def _sending(self, offer: Offer, sock: socket.socket) -> Iterator[Callable[[], None]]:
        """Registers `sock` to be cut by close(); the yielded function raises unless the offer is still open."""

        def seal() -> None:
            with self._lock:
                offer.sending.discard(sock)
                offer.last_used_s = time.monotonic()
                if offer.closed:
                    raise _Cut

        with self._lock:
            if offer.closed:
                raise _Cut
            offer.sending.add(sock)
        try:
            yield seal
        finally:
            with self._lock:
                offer.sending.discard(sock)


def _read_request(connection: _Connection) -> _Request | None:
    """The next request head; None at the orderly end of the connection, and after garbage was answered."""
    buffer, sock = connection.buffer, connection.sock
    end = None if connection.trusted else time.monotonic() + HEAD_S
    while (stop := buffer.find(b"\r\n\r\n")) < 0:
        if len(buffer) > HEAD_BYTES_MAX or (end is not None and time.monotonic() > end):
            return _refuse_garbage(sock)
        data = sock.recv(HEAD_BYTES_MAX)
        if not data:
            return None
        buffer += data
    head = bytes(buffer[:stop]).decode("latin-1").split("\r\n")
    del buffer[: stop + 4]
    words = head[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return _refuse_garbage(sock)
    authorization = None
    for line in head[1:]:
        name, _, value = line.partition(":")
        lowered = name.lower()
        if lowered == "authorization":
            authorization = value.strip()
        elif lowered in ("content-length", "transfer-encoding") and value.strip() != "0":
            return _refuse_garbage(sock)
    return _Request(words[0], words[1], authorization)


def _refuse_garbage(sock: socket.socket) -> _Request | None:
    body = b"not a request of the ft-training healing protocol\n"
    _send(sock, [_head(400, len(body)), body])
    return None


def _head(status: int, length: int, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {length}\r\n{extra}\r\n".encode("ascii")


def _send(sock: socket.socket, pieces: list[bytes | memoryview]) -> None:
    """Send all pieces with as few system calls as the kernel allows; each runs without the GIL."""
    views = [memoryview(piece) for piece in pieces]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]
