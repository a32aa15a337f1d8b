"""The donor's side of healing: serves offered state by byte range, straight from live memory.

What it answers (HTTP/1.1, GET only; see `http_wire` for the trailer that ends every body)
    /state/<tag>/manifest?wait_ms=N      skeleton and leaf list of the offer; waits up to N ms for it to be made
    /state/<tag>/range/<i>               the bytes of range i
    /state/<tag>/sums?first=a&count=n    n little-endian u32 checksums of ranges a...
    /prefetch?wait_ms=N                  manifest of a *live* offer (tag in X-FT-Tag), made by the training thread
    /blob/<name>                         small answers others register (`add_blob`)

`offer_book` says why nothing that is served can be torn. Sparing the trainer: threads spend their time in sendmsg and
crc32, which release the GIL, in pieces of megabytes (`sockets` says why the sockets are blocking). Checksums run on at
most two threads at a time.

Threads: `ft-heal-accept` owns the listener and drops idle live offers; one `ft-heal-conn` per connection (bounded). The
training thread calls offer, offer_live, close and reads `snapshot_wanted`. `_lock` guards connections and blobs,
and is held for bookkeeping only.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from ft_core.checkpointing import auth
from ft_core.checkpointing.http_wire import (
    TRAILER,
    TRAILER_OK,
    ByteStream,
    Cut,
    Refusal,
    Request,
    head,
    read_request,
    send,
)
from ft_core.checkpointing.memory import checksum
from ft_core.checkpointing.offer_book import OfferBook
from ft_core.checkpointing.sockets import cut, set_timeouts, track
from ft_core.errors import ConfigError, UsageError
from ft_core.net import advertised_host

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from ft_core.checkpointing.offer import Offer

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 32
BACKLOG: Final = 128
BLOBS_MAX: Final = 64
HEAD_S: Final = 5.0
"""A connection that has not finished its first request head after this is cut."""
KEEPALIVE_S: Final = 30.0
CHECKSUM_THREADS_MAX: Final = 2
SHUTDOWN_S: Final = 2.0


class _Connection:
    """One receiver's connection. `trusted` once a request of it authenticated; guarded by the server's lock."""

    __slots__ = ("stream", "trusted")

    def __init__(self, sock: socket.socket) -> None:
        self.stream = ByteStream(sock)
        self.trusted = False


class StateServer:
    """Serves offered state to healing peers. `start()` opens the port; see the file header."""

    def __init__(self, token: str | None = None, *, bind: str = "", hostname: str | None = None, port: int = 0) -> None:
        """`bind`: address to listen on ("" = all interfaces). `hostname`: what peers are told to connect to."""
        if token == "":
            raise ConfigError("token must not be an empty string; unset FT_TOKEN or give it a value")
        self._token = token
        self._bind = bind
        self._hostname = hostname
        self._port = port
        self._book = OfferBook()
        self._lock = threading.Lock()
        self._blobs: dict[str, Callable[[], bytes | None]] = {}
        self._connections: set[_Connection] = set()
        self._threads: list[threading.Thread] = []  # of connections; the dead ones go when the next one comes
        self._checksum_slots = threading.BoundedSemaphore(CHECKSUM_THREADS_MAX)
        self._listener: socket.socket | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._address = ""

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "listening" if self._listener else "new"
        live = self._book.live_tag()
        tags = self._book.tags() + ([live] if live else [])
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
                        ("", self._port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
                    )
            family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
            return socket.create_server((self._bind, self._port), family=family, backlog=BACKLOG)
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
            if self._stopped:
                return
            self._stopped = True
            threads = list(self._threads)
            for connection in self._connections:
                cut(connection.stream.sock)
        self._book.stop()
        self._wake_up()
        end = time.monotonic() + SHUTDOWN_S
        for thread in (self._thread, *threads):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        for sock in (self._listener, *(self._wake or ())):
            if sock is not None:
                sock.close()

    # -- what the training thread calls

    @property
    def snapshot_wanted(self) -> bool:
        """A newcomer waits for a live offer: call `offer_live` at the next step boundary. Cheap to read every step."""
        return self._book.snapshot_wanted

    def offer(self, tag: str, state: object, *, copy_storages: Container[int] = ()) -> None:
        """Serve `state` under `tag` until `close(tag)`, which must be called before any of its tensors changes.

        Tensors are served from where they lie. Copied now: leaves up to 64 KiB, leaves whose
        `untyped_storage().data_ptr()` is in `copy_storages` (what forward changes), CUDA and non-contiguous tensors.
        At most four offers are open; a fifth closes the oldest.
        Raises `EncodingError` naming the key path of what cannot be sent.
        """
        self._book.offer(tag, state, copy_storages)

    def offer_live(self, state: object) -> None:
        """Answer `snapshot_wanted`: let newcomers read `state` as it is and as it changes. Copies small leaves only.

        The offer is dropped after some seconds without requests. Raises `EncodingError`.
        """
        self._book.offer_live(state)
        self._wake_up()

    def refuse(self, tag: str, why: str) -> None:
        """Answer whoever asks for `tag` that this state cannot be sent, so that nobody waits for it."""
        self._book.refuse(tag, why)

    def refuse_live(self, why: str) -> None:
        """Answer `snapshot_wanted` with a refusal."""
        self._book.refuse_live(why)

    def close(self, tag: str) -> None:
        """From now on nothing of `tag` is served: what was being sent will not verify. Returns without waiting."""
        self._book.close((tag,))

    def close_all(self) -> None:
        """`close` every offer (a live one, which promises nothing, stays)."""
        self._book.close()

    def drop_live(self) -> None:
        """Stop serving the live offer now, for example before its memory goes away."""
        self._book.drop_live()

    def open_tags(self) -> list[str]:
        """Tags of the open offers, oldest first."""
        return self._book.tags()

    def add_blob(self, name: str, provider: Callable[[], bytes | None]) -> None:
        """Answer `/blob/<name>` with what `provider` returns (None: 404). It runs on a connection thread; be quick."""
        with self._lock:
            if name not in self._blobs and len(self._blobs) >= BLOBS_MAX:
                raise UsageError(f"more than {BLOBS_MAX} blobs")
            self._blobs[name] = provider

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
                left_s = self._book.expire_live()
                events = dict(poller.poll(None if left_s is None else left_s * 1000))
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

    def _admit(self, sock: socket.socket) -> None:
        track(sock)
        connection = _Connection(sock)
        thread = threading.Thread(target=self._serve, args=(connection,), name="ft-heal-conn", daemon=True)
        victim: _Connection | None = None
        with self._lock:
            if len(self._connections) >= CONNECTIONS_MAX:
                # Strangers must not keep peers out: the newcomer takes the place of one that never authenticated.
                victim = next((c for c in self._connections if not c.trusted), connection)
                self._connections.discard(victim)
            if self._stopped:
                victim = connection
            if victim is not connection:
                try:
                    thread.start()
                except RuntimeError as e:  # the process is out of threads
                    logger.warning("healing port %s: cannot serve a connection: %s", self._address, e)
                    victim = connection
                else:
                    self._connections.add(connection)
                    self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            if victim is not None:
                cut(victim.stream.sock)
        if victim is connection:
            sock.close()

    # -- connection threads

    def _serve(self, connection: _Connection) -> None:
        sock = connection.stream.sock
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_timeouts(sock, receive_s=HEAD_S, send_s=KEEPALIVE_S)
            while not self._stopped:
                request = read_request(connection.stream, None if connection.trusted else HEAD_S)
                if request is None or not self._answer(connection, request):
                    return
        except (OSError, Cut):
            pass  # the receiver notices by itself, and re-plans
        except Exception:
            logger.exception("healing port %s: request failed", self._address)
        finally:
            # Before close(): a peer with unread bytes in flight then gets an orderly end instead of a reset.
            cut(sock)
            with self._lock:
                self._connections.discard(connection)
                sock.close()  # under the lock: whoever cuts a listed connection must not hit a reused fd

    def _answer(self, connection: _Connection, request: Request) -> bool:
        """Answer one request; False ends the connection."""
        sock = connection.stream.sock
        try:
            if request.method != "GET":
                raise Refusal(405, "only GET is served here")
            if self._token is not None and not auth.verify(
                self._token, request.method, request.target, request.authorization
            ):
                raise Refusal(403, "token missing or wrong: FT_TOKEN must be the same for all replicas of a job")
            if not connection.trusted:
                with self._lock:
                    connection.trusted = True
                set_timeouts(sock, receive_s=KEEPALIVE_S, send_s=KEEPALIVE_S)
            self._route(sock, request)
        except Refusal as e:
            body = f"{e}\n".encode("utf-8", "replace")
            send(sock, [head(e.status, len(body)), body])
            return e.status in (404, 410)
        return True

    def _route(self, sock: socket.socket, request: Request) -> None:
        try:
            url = urlsplit(request.target)
            parts = [unquote(part) for part in url.path.split("/")[1:]]
            query = {name: int(values[0]) for name, values in parse_qs(url.query).items()}
            wait_s = query.get("wait_ms", 0) / 1000
            if parts == ["prefetch"]:
                return self._send_manifest(sock, self._book.wait_for_live(wait_s))
            if len(parts) == 2 and parts[0] == "blob":
                return self._send_blob(sock, parts[1])
            if len(parts) >= 3 and parts[0] == "state":
                if parts[2] == "manifest":
                    return self._send_manifest(sock, self._book.find(parts[1], wait_s))
                if parts[2] == "range" and len(parts) == 4:
                    return self._send_range(sock, self._book.find(parts[1]), int(parts[3]))
                if parts[2] == "sums":
                    return self._send_sums(sock, self._book.find(parts[1]), query["first"], query["count"])
        except (ValueError, KeyError, OverflowError) as e:
            raise Refusal(400, f"bad request: {e!r}") from e
        raise Refusal(404, "this is the healing port of an ft-training replica; there is nothing at this path")

    def _send_blob(self, sock: socket.socket, name: str) -> None:
        with self._lock:
            provider = self._blobs.get(name)
        body = provider() if provider is not None else None
        if body is None:
            raise Refusal(404, f"there is no blob {name!r} here")
        send(sock, [head(200, len(body) + TRAILER.size), body, TRAILER.pack(TRAILER_OK, checksum(body))])

    def _send_manifest(self, sock: socket.socket, offer: Offer) -> None:
        body = offer.manifest()
        extra = f"X-FT-Tag: {quote(offer.tag, safe='')}\r\nX-FT-Layout: {offer.digest}\r\n"
        with self._book.sending(offer, sock) as seal:
            send(sock, [head(200, len(body) + TRAILER.size, extra), body])
            seal()
        send(sock, [TRAILER.pack(TRAILER_OK, checksum(body))])

    def _send_range(self, sock: socket.socket, offer: Offer, index: int) -> None:
        if not 0 <= index < len(offer.ranges):
            raise Refusal(400, f"range {index} of {len(offer.ranges)}")
        with self._book.sending(offer, sock) as seal:
            if not offer.intact(index):
                raise Cut
            value, view = self._checksum(offer, index)
            send(sock, [head(200, len(view) + TRAILER.size), view])
            seal()
        send(sock, [TRAILER.pack(TRAILER_OK, value)])

    def _send_sums(self, sock: socket.socket, offer: Offer, first: int, count: int) -> None:
        if not 0 <= first < first + count <= len(offer.ranges):
            raise Refusal(400, f"ranges {first}+{count} of {len(offer.ranges)}")
        with self._book.sending(offer, sock) as seal:
            if not all(offer.intact(index) for index in range(first, first + count)):
                raise Cut
            values = [self._checksum(offer, index)[0] for index in range(first, first + count)]
            seal()
        body = struct.pack(f"<{count}I", *values)
        send(sock, [head(200, len(body) + TRAILER.size), body, TRAILER.pack(TRAILER_OK, checksum(body))])

    def _checksum(self, offer: Offer, index: int) -> tuple[int, memoryview]:
        view = offer.view(index)
        if offer.live:
            return 0, view  # it may change before it is sent; the receiver compares later
        with self._checksum_slots:
            if offer.closed:
                raise Cut
            return checksum(view), view
