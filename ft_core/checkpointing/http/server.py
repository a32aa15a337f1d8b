"""The donor's side of healing: serves offered state by byte range, straight from live memory.

What it answers (HTTP/1.1, GET only; see `wire` for the trailer that ends every body)
    /state/<tag>/manifest?wait_ms=N      skeleton and leaf list of the offer; waits up to N ms for it to be made
    /state/<tag>/range/<i>               the bytes of range i
    /state/<tag>/sums?first=a&count=n    n little-endian u64 checksums of ranges a...
    /prefetch?wait_ms=N                  manifest of a *live* offer (tag in X-FT-Tag), made by the training thread
    /blob/<name>                         small answers others register (`add_blob`)

`offers` has why nothing that is served can be torn, `places` who is served and who waits. Sparing the trainer:
threads spend their time in sendmsg and checksums, which release the GIL, in pieces of megabytes (`sockets` says why the
sockets are blocking).

Threads: `ft-heal-accept` owns the listener and every connection without a thread: those that wait for a place, and
those that wait for an offer (parked). It hands places out, drops idle live offers, and cuts who has to go. One
`ft-heal-conn` per place serves one connection, until that ends or has to wait. The training thread calls offer,
offer_live, close and reads `snapshot_wanted`. `_lock` guards places and connections, and is held for bookkeeping only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from ft_core.access import asks_nothing, check_listener
from ft_core.access import insecure as trusts_all
from ft_core.checkpointing.http.answers import Answers
from ft_core.checkpointing.http.byte_stream import HEAD_S, ByteStream, Meter
from ft_core.checkpointing.http.places import Guest, Places
from ft_core.checkpointing.http.sockets import cut, listen, track
from ft_core.checkpointing.http.wire import BUSY, Cut, NotYet, Refusal, Request, head, read_request
from ft_core.checkpointing.offer import Offer
from ft_core.checkpointing.offers import OfferBook
from ft_core.checkpointing.range_sums import RangeSums
from ft_core.checkpointing.staging import Staging
from ft_core.errors import ConfigError, UsageError
from ft_core.network import advertised_host, is_loopback
from ft_core.settings import STAGING_MB

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from ft_core.certificates import CertificateFiles, Tls
    from ft_core.checkpointing.receive_plan import ReceivePlan

logger = logging.getLogger(__name__)

KEEPALIVE_S: Final = 30.0
"""Longest a connection may be idle, or take nothing of an answer, also if nobody waits."""
LOOK_S: Final = 0.25
"""While somebody waits for a place, those who have one are looked at this often."""
LINGER_MAX: Final = 64
LINGER_S: Final = 1.0
"""How long a connection that is sent away may take to read why."""
RETRY_S: Final = 1
SHUTDOWN_S: Final = 2.0


class _Connection:
    """One receiver's connection. `trusted` once a request of it authenticated. One thread at a time has it."""

    __slots__ = ("guest", "pending", "stream", "trusted", "until", "waits")

    def __init__(self, sock: socket.socket, peer: str) -> None:
        meter = Meter()
        self.guest = Guest(peer, meter)
        self.stream = ByteStream(sock, meter)
        self.trusted = False
        self.pending: Request | None = None
        """A request that was read and waits for its offer."""
        self.waits: NotYet | None = None
        self.until = 0.0


class StateServer:
    """Serves offered state to healing peers. `start()` opens the port; see the file header."""

    def __init__(
        self,
        token: str | None = None,
        *,
        bind: str | None = None,
        hostname: str | None = None,
        port: int = 0,
        tls: Tls | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`bind`: address to listen on ("" = all interfaces). `hostname`: what peers connect to.

        What other machines reach needs a token, or certificates with a CA (`start`). None: all interfaces if there is
        either, or others are to connect to `hostname`; else this machine only.
        `staging`: what state on a device passes through.
        `tls`: the job's certificates; with them nothing is served in clear, and with a CA only to its holders.
        """
        if token == "":
            raise ConfigError("token must not be an empty string; unset FT_TOKEN or give it a value")
        self._token = token
        self._tls = tls
        self._hostname = hostname
        self._files: CertificateFiles | None = None
        """Of what it encrypts with, once it has started."""
        self._bind = bind if bind is not None else self._default_bind()
        self._port = port
        self.book: Final = OfferBook(self._wake_up)
        """What is offered here, for whoever serves it by another way, too; `sums`: how it is read then."""
        self.sums: Final = RangeSums(staging if staging is not None else Staging(STAGING_MB << 20))
        self._answers = Answers(self.book, self.sums, token)
        self._lock = threading.Lock()
        self._places = Places()
        self._connections: dict[Guest, _Connection] = {}
        self._threads: list[threading.Thread] = []  # of connections; the dead ones go when the next one comes
        self._lingering: dict[socket.socket, float] = {}  # the accept thread's, at most LINGER_MAX
        self._watched: dict[int, _Connection] = {}  # the accept thread's: connections it polls for their end, by fd
        self._listener: socket.socket | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._address = ""

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "listening" if self._listener else "new"
        live = self.book.live_tag()
        tags = self.book.tags() + ([live] if live else [])
        where = self._address or "no address"
        return f"StateServer({where}, {state}, offers={tags}, {self._places!r})"

    # -- life cycle

    def _default_bind(self) -> str:
        here = self._hostname is None or is_loopback(self._hostname)
        return "127.0.0.1" if here and asks_nothing(self._token or "", self._tls, trusts_all(os.environ)) else ""

    def start(self) -> StateServer:
        """Listen. `ConfigError` if the address cannot be bound, or anybody could read the state there."""
        if self._listener is not None or self._stopped:
            raise UsageError("StateServer.start() may be called once")
        check_listener(
            f"the server of this replica's state (bind={self._bind!r})", self._bind or "::", self._token or "",
            self._tls, "whoever reaches this address may read the model", trusts_all(os.environ),
        )  # fmt: skip
        bound = self._bind if self._bind not in ("", "::", "0.0.0.0") else None
        host = advertised_host(self._hostname or bound, None)
        if self._tls is not None:
            files = self._tls.check_serves("what this server sends would go out").check_names(host).files()
            files.watch()
            self._files = files
        try:
            self._listener = listen(self._bind, self._port)
        except BaseException:
            self.shutdown()
            raise
        self._wake = socket.socketpair()
        for sock in (self._listener, *self._wake):
            track(sock)
        port = self._listener.getsockname()[1]
        scheme = "http" if self._files is None else "https"
        self._address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._thread = threading.Thread(target=self._accept_loop, name="ft-heal-accept", daemon=True)
        self._thread.start()
        return self

    @property
    def address(self) -> str:
        """`http://host:port` (with TLS `https://`), what peers pass to `fetch`."""
        if not self._address:
            raise UsageError("StateServer.address is known after start()")
        return self._address

    def shutdown(self) -> None:
        """Stop serving, cut every connection, end all threads. Idempotent, bounded in time."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for connection in self._connections.values():
                cut(connection.stream.sock)
        self.book.stop()
        self._wake_up()
        end = time.monotonic() + SHUTDOWN_S
        if self._thread is not None:
            self._thread.join(SHUTDOWN_S)  # it starts no more threads
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        for sock in (self._listener, *(self._wake or ())):
            if sock is not None:
                sock.close()
        if self._files is not None:
            self._files.unwatch()

    # -- what the training thread calls

    @property
    def snapshot_wanted(self) -> bool:
        """A newcomer waits for a live offer: call `offer_live` at the next step boundary. Cheap to read every step."""
        return self.book.snapshot_wanted

    def offer(self, tag: str, state: object, *, copy_storages: Container[int] = ()) -> None:
        """Serve `state` under `tag` until `close(tag)`, which must be called before any of its tensors changes.

        Tensors are served from where they lie. Copied now: leaves up to 64 KiB, leaves whose
        `untyped_storage().data_ptr()` is in `copy_storages` (what forward changes), non-contiguous tensors. What lies
        on a CUDA device is copied range by range when a receiver asks for it.
        At most four offers are open; a fifth closes the oldest.
        Raises `EncodingError` naming the key path of what cannot be sent.
        """
        self.sums.staging.follow(state)  # on whatever stream it was trained, and this thread copies
        self.book.offer(tag, state, copy_storages)

    def offer_live(self, state: object) -> None:
        """Answer `snapshot_wanted`: let newcomers read `state` as it is and as it changes. Copies small leaves only.

        The offer is dropped after some seconds without requests. Raises `EncodingError`.
        """
        self.book.offer_live(state)

    def refuse(self, tag: str, why: str) -> None:
        """Answer whoever asks for `tag` that this state cannot be sent, so that nobody waits for it."""
        self.book.refuse(tag, why)

    def refuse_live(self, why: str) -> None:
        """Answer `snapshot_wanted` with a refusal."""
        self.book.refuse_live(why)

    def relay(self, tag: str, plan: ReceivePlan) -> None:
        """Serve a state that was just received, so that the donors need not send it to everybody.

        Not before all of it was verified. What its user changes afterwards is not served (`Offer.relay`).
        """
        with contextlib.suppress(UsageError):  # shut down meanwhile: nobody counts on a relay
            self.book.open(Offer.relay(tag, plan))

    def close(self, tag: str) -> None:
        """From now on nothing of `tag` is served: what was being sent will not verify. Returns without waiting."""
        self.book.close((tag,))

    def close_all(self) -> None:
        """`close` every offer (a live one, which may be torn anyway, stays)."""
        self.book.close()

    def drop_live(self) -> None:
        """Stop serving the live offer now, for example before its memory goes away."""
        self.book.drop_live()

    def open_tags(self) -> list[str]:
        """Tags of the open offers, oldest first."""
        return self.book.tags()

    def add_blob(self, name: str, provider: Callable[[], bytes | None]) -> None:
        """Answer `/blob/<name>` with what `provider` returns (None: 404). It runs on a connection thread; be quick."""
        self._answers.add_blob(name, provider)

    def add_blobs(self, prefix: str, provider: Callable[[str], bytes | None]) -> None:
        """Answer all names that begin with `prefix` like `add_blob`; `provider` gets the rest of the name."""
        self._answers.add_blobs(prefix, provider)

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
        for sock in wake:
            sock.setblocking(False)  # a full pipe wakes just as well
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(wake[0], select.POLLIN)
        while not self._stopped:
            try:
                wait_s = self._tend(poller)
                events = dict(poller.poll(None if wait_s is None else wait_s * 1000))
                if wake[0].fileno() in events:
                    wake[0].recv(4096)
                if listener.fileno() in events:
                    sock, address = listener.accept()
                    self._admit(sock, str(address[0]))
                for fd in events.keys() & self._watched.keys():
                    self._end(self._watched[fd])  # it hung up while it waited
            except BlockingIOError:
                continue
            except OSError as e:
                if self._stopped:
                    break
                # Out of fds, or a connection that died in the queue: other peers must still be served.
                logger.warning("healing port %s: accept failed: %s", self._address, e)
                time.sleep(0.05)
        with self._lock:
            left = [c for g, c in self._connections.items() if g not in self._places.served]
        for connection in left:
            self._end(connection)
        for sock in self._lingering:
            sock.close()

    def _tend(self, poller: select.poll) -> float | None:
        """Let in who can be served, send away who has to go; returns the seconds until the next look."""
        now = time.monotonic()
        with self._lock:
            held = [self._connections[guest] for guest in self._places.parked]
            for connection in held:
                assert connection.waits is not None
                if self.book.answers(connection.waits) or now >= connection.until:
                    self._places.unpark(connection.guest)
            for guest in self._places.overdue(now):
                cut(self._connections[guest].stream.sock)  # its thread gives the place back
            promoted = [self._connections[guest] for guest in self._places.promote()]
            waiting = [self._connections[g] for g in (*self._places.waiting, *self._places.parked)]
            parked = [self._connections[guest] for guest in self._places.parked]
            contended = bool(self._places.waiting)
        self._watch(poller, waiting)
        for connection in promoted:
            self._serve_on_a_thread(connection)
        self.book.want_live(any(c.waits is not None and c.waits.tag is None for c in parked))
        for sock, until in list(self._lingering.items()):
            if now >= until:
                del self._lingering[sock]
                sock.close()
        times = [c.until for c in parked] + list(self._lingering.values()) + ([now + LOOK_S] if contended else [])
        live_s = self.book.expire_live()
        waits = [max(0.0, at - now) for at in times] + ([live_s] if live_s is not None else [])
        return min(waits, default=None)

    def _watch(self, poller: select.poll, waiting: list[_Connection]) -> None:
        """Poll exactly these connections for their end. Not for requests: those wait in the kernel."""
        wanted = {c.stream.sock.fileno(): c for c in waiting}
        for fd in self._watched.keys() - wanted.keys():
            poller.unregister(fd)
        for fd in wanted.keys() - self._watched.keys():
            poller.register(fd, select.POLLRDHUP)
        self._watched = wanted

    def _admit(self, sock: socket.socket, peer: str) -> None:
        if self._files is not None:
            try:
                sock = self._files.encrypt(sock)
            except OSError:  # it has gone: nobody else waits for that, and nobody need be told
                sock.close()
                return
        track(sock)
        connection = _Connection(sock, peer)
        with self._lock:
            if not self._stopped and self._places.arrive(connection.guest):
                self._connections[connection.guest] = connection
                return
        # The answer fits the empty send buffer. What the peer sent stays unread: closing at once would be a reset.
        body = b"busy: too many receivers wait already\n"
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            if self._files is None:  # else it takes the end of the connection for it
                sock.send(head(BUSY, len(body), f"Retry-After: {RETRY_S}\r\n") + body)
            socket.socket.shutdown(sock, socket.SHUT_WR)
        if len(self._lingering) >= LINGER_MAX:
            oldest = next(iter(self._lingering))
            del self._lingering[oldest]
            oldest.close()
        self._lingering[sock] = time.monotonic() + LINGER_S

    def _serve_on_a_thread(self, connection: _Connection) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="ft-heal-conn", daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        try:
            thread.start()
        except RuntimeError as e:  # the process is out of threads
            logger.warning("healing port %s: cannot serve a connection: %s", self._address, e)
            with self._lock:
                self._threads.remove(thread)
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """Let go of a connection; any thread that has it."""
        sock = connection.stream.sock
        # Before close(): a peer with unread bytes in flight then gets an orderly end instead of a reset.
        cut(sock)
        with self._lock:
            self._connections.pop(connection.guest, None)
            self._places.leave(connection.guest)
            sock.close()  # under the lock: whoever cuts a listed connection must not hit a reused fd
        if threading.current_thread() is not self._thread:
            self._wake_up()

    # -- connection threads

    def _serve(self, connection: _Connection) -> None:
        try:
            if self._converse(connection):
                self._wake_up()
                return
        except (OSError, Cut):
            pass  # the receiver notices by itself, and re-plans
        except Exception:
            logger.exception("healing port %s: request failed", self._address)
        self._end(connection)

    def _converse(self, connection: _Connection) -> bool:
        """Answer requests until the connection is to end; True: it is parked, and no longer this thread's."""
        stream = connection.stream
        if connection.pending is None:
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.set_idle(HEAD_S, KEEPALIVE_S)
            stream.handshake(HEAD_S)  # a connection that was parked has a pending request
        while not self._stopped:
            request, waited = connection.pending, connection.waits
            connection.pending = connection.waits = None
            if request is None:
                request = read_request(stream, None if connection.trusted else HEAD_S)
                if request is None:
                    return False
            try:
                if not self._answer(connection, request, waited):
                    return False
            except NotYet as wanted:
                connection.pending, connection.waits = request, wanted
                connection.until = time.monotonic() + wanted.wait_s
                with self._lock:
                    return self._places.park(connection.guest)
        return False

    def _answer(self, connection: _Connection, request: Request, waited: NotYet | None) -> bool:
        """Answer one request; False ends the connection."""
        stream, guest = connection.stream, connection.guest
        try:
            self._answers.check(request)
            guest.spoke = True
            if not connection.trusted:
                connection.trusted = True
                stream.set_idle(KEEPALIVE_S, KEEPALIVE_S)
            self._answers.answer(stream, request, waited)
        except Refusal as e:
            body = f"{e}\n".encode("utf-8", "replace")
            stream.send([head(e.status, len(body)), body])
            return e.status in (404, 410)
        return True
