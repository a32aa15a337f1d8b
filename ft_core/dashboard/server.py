"""The dashboard on a thread and loop of its own: address, start, end, and its look at the lighthouse every TICK_S.

How it works. `bind` takes the port, so that one in use is an error there and then; the thread imports aiohttp (which
takes some tenths of a second), serves, and asks its `Source` for a sample every TICK_S. A replica reports four times a
second: what the page shows is less than a second old. The page itself is computed only while somebody watches, once
for all.

Invariants: nothing here is awaited by the lighthouse, which only takes the samples, on its own loop, and performs
orders; a lighthouse that does not answer is a sentence on the page. `shutdown` is idempotent and bounded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import importlib.util
import logging
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Protocol

from ft_core.dashboard.feed import Feed, encode
from ft_core.dashboard.model import ROLES, Memory
from ft_core.errors import ConfigError
from ft_core.rpc.channel import Tls, join_host, reachable_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from ft_core.dashboard.access import Access
    from ft_core.dashboard.model import Model
    from ft_core.dashboard.sample import Sample
    from ft_core.dashboard.web_app import WebApp

TICK_S = 0.3
SHARE = 0.1
"""Of one core, for looking and sending: with a thousand replicas and someone who watches, it looks less often."""
CONNECTIONS_MAX = 128
"""Open at the same time; one more is answered that there are too many, and closed."""
ANSWER_S = 2.0
"""How long a sample is waited for before the next one is asked for."""
ILL_S = 5.0
"""A lighthouse that has given no sample for so long does not work."""
ORDER_S = 5.0
SAY_S = 60.0
"""How often the same failure is logged at most."""
STOP_S = 1.0
"""How long requests that are being answered may take to end."""
SEND_BYTES = 128 << 10
"""What the kernel keeps for one connection: a browser that does not read is noticed soon."""
BACKLOG = 128
HANDSHAKE_S = 10.0

_log = logging.getLogger("ft_core.lighthouse")


class Source(Protocol):
    """The lighthouse, as the dashboard sees it. Both return at once."""

    def sample(self) -> concurrent.futures.Future[Sample]:
        """How everything is, and what happened since the last sample."""

    def order(self, *, kill: bool, room: str, replica: str, reason: str) -> concurrent.futures.Future[list[str]]:
        """Drain or kill a replica_id; who was sent the order."""


def available() -> bool:
    """Whether aiohttp is installed; does not import it."""
    return importlib.util.find_spec("aiohttp") is not None


class Dashboard:
    """One dashboard. The constructor assigns; `start` listens.

    Args:
        host, port: what to listen on; port 0: any free one.
        source: the lighthouse.
        access: who may do what.
        tls: certificates, for anything but loopback (a browser is not asked for one).
        setting: what to call the address in errors.
        any_port: if that port is in use, take a free one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        source: Source,
        access: Access,
        *,
        tls: Tls | None = None,
        setting: str = "http",
        any_port: bool = False,
    ) -> None:
        self.access = access
        self.feed = Feed()
        self.port = 0
        self._where = host, port
        self._source = source
        self._tls = None if access.local else tls
        self._setting = setting
        self._any_port = any_port
        self._memory = Memory()
        self._page: Model | None = None
        """The page of the last look, once somebody has asked for it."""
        self._encoded = b""
        """The same as JSON."""
        self._sampled_at = time.monotonic()
        self._sampled = False
        self._say_at = 0.0
        self._socket: socket.socket | None = None
        self._tls_context: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-dashboard", daemon=True)

    def __repr__(self) -> str:
        return f"Dashboard({self.address() if self.port else 'not started'}, {self.feed!r})"

    def bind(self) -> None:
        """Listen; nobody is answered before `start`.

        Raises:
            ConfigError: the address cannot be bound, or the certificates cannot be read.
        """
        self._tls_context = self._context()
        self._socket = self._bound()
        self.port = self._socket.getsockname()[1]

    def start(self) -> None:
        """Serve; `bind` comes first."""
        self._thread.start()

    def address(self) -> str:
        """http://host:port."""
        host = self._where[0]
        there = join_host(host if self.access.local else reachable_host(host), self.port)
        return f"http{'s' if self._tls else ''}://{there}"

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Close all connections, end the thread. Idempotent."""
        self._stopping.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(stop.set)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._socket is not None:
            self._socket.close()

    # ------------------------------------------------------------ Desk

    def page(self) -> Model:
        """The newest page."""
        if self._page is None:
            access = self.access
            self._page = {
                **self._memory.page(),
                "silent_s": round(self._silent_s(), 1),
                "orders": {"on": not access.orders_off, "why": access.orders_off},
            }
        return self._page

    def encoded(self) -> bytes:
        """The newest page as JSON; put together once, however many ask."""
        self._encoded = self._encoded or encode(self.page())
        return self._encoded

    def illness(self) -> str:
        """Why the lighthouse does not work; '': it does."""
        silent_s = self._silent_s()
        return f"the lighthouse has not answered for {silent_s:.1f} s" if silent_s > ILL_S else ""

    def unready(self) -> str:
        """Why nobody should be sent to it yet; '': it is ready."""
        return "" if self._sampled else "the lighthouse has not answered yet"

    def standing(self) -> str:
        """What the lighthouse does in a pair, in words for everybody: without addresses; '': it is alone."""
        pair = self.page()["pair"]
        return ROLES[pair["role"]] if pair else ""

    async def order(self, *, kill: bool, room: str, replica: str, reason: str) -> list[str]:
        """Who was sent the order."""
        asked = self._source.order(kill=kill, room=room, replica=replica, reason=reason)
        return await asyncio.wait_for(asyncio.wrap_future(asked), ORDER_S)

    def _silent_s(self) -> float:
        return time.monotonic() - self._sampled_at

    # ------------------------------------------------------------ the socket

    def _context(self) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        files = self._tls.check_serves("what the dashboard shows would go out").files()
        first = files.now.page
        assert first is not None

        def newest(connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
            """The files may have been replaced since this listens."""
            page = files.now.page
            if page is not None:
                connection.context = page

        first.sni_callback = newest
        return first

    def _bound(self) -> socket.socket:
        host, port = self._where
        where = f"{self._setting}={join_host(host, port)}"
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError(f"{where}: the host name {host!r} cannot be resolved ({error.strerror})") from None
        family, kind, proto, _, address = found[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host not in ("", "::")))
            try:
                bound.bind(address)
            except OSError as error:
                if not self._any_port or error.errno != errno.EADDRINUSE:
                    raise
                bound.bind((address[0], 0, *address[2:]))
                _log.info("port %d is in use by another process: the dashboard takes a free one", port)
            bound.listen(BACKLOG)
            bound.setblocking(False)
        except OSError as error:
            bound.close()
            why = f"{error.strerror}; name another address"
            if error.errno == errno.EADDRINUSE:
                why = "the port is in use by another process; stop that one, or name another port (0: any free one)"
            raise ConfigError(f"{where} cannot be bound: {why}, or off for no dashboard") from None
        return bound

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        except BaseException:  # noqa: BLE001 - logged
            _log.exception("the dashboard has ended; the lighthouse goes on without it")
        finally:
            self._loop = None
            loop.run_until_complete(_end_tasks())
            loop.close()
            assert self._socket is not None
            self._socket.close()  # nobody waits for an answer that does not come

    async def _serve(self) -> None:
        from aiohttp import web  # here: it takes a while, and the lighthouse answers already

        from ft_core.dashboard.web_app import WebApp, http_log

        assert self._socket is not None
        app = WebApp(self)
        runner = web.AppRunner(
            app.application(), access_log=None, handle_signals=False, shutdown_timeout=STOP_S, keepalive_timeout=30.0,
            logger=http_log,
        )  # fmt: skip
        self._stop = stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await runner.setup()
        listener: asyncio.Server | None = None
        try:
            assert runner.server is not None
            listener = await self._loop.create_server(
                _bounded(runner.server, app),
                sock=self._socket,
                ssl=self._tls_context,
                backlog=BACKLOG,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls_context is not None else None,
            )
            while not (stop.is_set() or self._stopping.is_set()):
                began, worked = time.monotonic(), time.thread_time()
                try:
                    await self._look()
                except Exception:  # noqa: BLE001 - logged
                    self._failed()
                took_s = time.thread_time() - worked
                left_s = max(took_s / SHARE, began + TICK_S - time.monotonic(), 0.0)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), left_s)
        finally:
            if listener is not None:
                listener.close()
            self.feed.end()
            await runner.cleanup()

    async def _look(self) -> None:
        """Take a sample, and send it to who watches."""
        try:
            sample = await asyncio.wait_for(asyncio.wrap_future(self._source.sample()), ANSWER_S)
        except (asyncio.TimeoutError, concurrent.futures.CancelledError, RuntimeError):
            pass  # `silent_s` says so on the page
        else:
            self._sampled_at, self._sampled = time.monotonic(), True
            self._memory.take(sample)
        self._page, self._encoded = None, b""
        if self.feed.readers:
            self.feed.publish(self.page())

    def _failed(self) -> None:
        """A look has failed, by a mistake of ours: log it, not with every look, and go on."""
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_S
            _log.exception("the dashboard's look at the lighthouse failed; it looks again")


class _Full(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        text = f"{CONNECTIONS_MAX} connections are open already: close a browser's tab\n".encode()
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        transport.write(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        transport.close()


def _bounded(server: web.Server, app: WebApp) -> Callable[[], asyncio.BaseProtocol]:
    """What serves a connection."""
    from ft_core.dashboard.web_app import SILENT_S

    def one() -> asyncio.BaseProtocol:
        if len(server.connections) >= CONNECTIONS_MAX:
            return _Full()
        made = server()
        app.silent.add(made)
        asyncio.get_running_loop().call_later(SILENT_S, send_away, made)
        return made

    def send_away(connection: web.RequestHandler) -> None:
        if connection in app.silent:
            app.silent.discard(connection)
            if connection.transport is not None:
                connection.transport.abort()

    return one


async def _end_tasks() -> None:
    """Cancel what is left on this loop, and wait for it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
