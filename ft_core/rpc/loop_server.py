"""An asyncio gRPC server on a thread of its own, and its streams. Shared by the lighthouse and the group server.

How it works. `LoopServer` runs one event loop in one daemon thread; everything a server decides happens on that loop,
so its state needs no locks. Other threads hand in work with `post` (fire and forget) or `call` (wait for the result).
Handlers get and give raw bytes: decoding belongs to `codec`, and a broadcast is encoded once.

`Stream` is one open bidirectional call: reads are awaited by its handler, writes are queued and sent by a task of its
own, so that a slow reader at the other end never holds up anybody else.

Invariants: a stream's queue is bounded (MAX_QUEUED, MAX_QUEUED_BYTES), beyond that the stream is dropped; `shutdown` is
idempotent and bounded, after it neither thread nor socket is left.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import socket
import threading
import urllib.parse
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from ft_core.errors import ConfigError
from ft_core.rpc.channel import (
    TOKEN_KEY,
    Options,
    Tls,
    grpc,
    join_host,
    order_refusal,
    server_credentials,
    token_refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core.access import Tokens

MAX_QUEUED = 1024
MAX_QUEUED_BYTES = 16 << 20
MAX_RPCS = 8192
STOP_S = 1.0
"""How long the handlers of a stopped server may take to end."""
FINISH_S = 2.0
"""How long a refused or leaving client may take to read its last message."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class StreamDropped(Exception):
    """The stream was ended from this side: its reader was too slow, or a newer stream replaced it."""


class Stream:
    """One open bidirectional call, used on the server's loop only; created inside its handler."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes], clock: Callable[[], float]) -> None:
        self.dropped = ""
        self._clock = clock
        self._heard_at = clock()
        self._context = context
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._handler = asyncio.current_task()
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def __repr__(self) -> str:
        return f"Stream(queued={len(self._queue)}{', dropped: ' + self.dropped if self.dropped else ''})"

    @property
    def silence_s(self) -> float:
        """Time since the last message, or since the start: whoever reads a stream need not keep it up to date."""
        return self._clock() - self._heard_at

    async def read(self) -> bytes | None:
        """The next message; None at the end. Raises StreamDropped after `drop`."""
        try:
            data: Any = await self._context.read()
        except asyncio.CancelledError:
            if self.dropped:
                raise StreamDropped(self.dropped) from None
            raise
        if data is grpc.aio.EOF:
            return None
        self._heard_at = self._clock()
        message: bytes = data
        return message

    def send(self, data: bytes) -> None:
        """Queue one message; never blocks."""
        if self.dropped or self._closing:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        if len(self._queue) > MAX_QUEUED or (self._queued_bytes > MAX_QUEUED_BYTES and len(self._queue) > 1):
            self.drop(f"reads too slowly: {len(self._queue)} messages were waiting for it")
            return
        self._wake.set()

    def drop(self, why: str) -> None:
        """End the stream now; its handler sees StreamDropped."""
        if not self.dropped:
            self.dropped = why
            self._queue.clear()
            if self._handler is not None:
                self._handler.cancel()

    async def finish(self) -> None:
        """Send what is queued, for at most FINISH_S."""
        self._closing = True
        self._wake.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._writer, FINISH_S)

    def stop(self) -> None:
        """End the writer. For the handler's `finally`."""
        self._writer.cancel()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.UsageError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._queue:
                    data = self._queue.popleft()
                    self._queued_bytes -= len(data)
                    await self._context.write(data)
                if self._closing:
                    return
                await self._wake.wait()
                self._wake.clear()


class Timers:
    """Delayed calls on the running loop that can be cancelled together; those that are due are forgotten."""

    def __init__(self) -> None:
        self._handles: set[asyncio.TimerHandle] = set()

    def __repr__(self) -> str:
        return f"Timers({len(self._handles)})"

    def later(self, delay_s: float, work: Callable[[], object]) -> asyncio.TimerHandle:
        """Call `work` after `delay_s`."""
        loop = asyncio.get_running_loop()
        self._handles = {timer for timer in self._handles if not timer.cancelled() and timer.when() > loop.time()}
        handle = loop.call_later(delay_s, work)
        self._handles.add(handle)
        return handle

    def cancel(self) -> None:
        """Call none of them."""
        for handle in self._handles:
            handle.cancel()


class Doorkeeper:
    """Compares the token of every call with the server's."""

    def __init__(self, tokens: Tokens, server: str) -> None:
        self._tokens = tokens
        self._server = server
        self._warned = False

    async def check(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """End a call that does not carry the token. A token that nobody asks for is logged, once."""
        metadata = context.invocation_metadata() or ()
        if not (self._tokens.job or self._tokens.admin or self._warned) and any(
            key == TOKEN_KEY for key, _ in metadata
        ):
            self._warned = True
            who = urllib.parse.unquote(context.peer())
            _log.warning("%s sent a token but %s has none (FT_TOKEN): anybody may connect", who, self._server)
        refusal = token_refusal(metadata, self._tokens, self._server)
        if refusal:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

    async def check_order(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """End a call that orders others about and whose token does not allow it."""
        refusal = order_refusal(context.invocation_metadata() or (), self._tokens, self._server)
        if refusal:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)


class LoopServer:
    """A gRPC server with its own thread and loop."""

    def __init__(self, name: str, options: Options, tls: Tls | None) -> None:
        self.port = 0
        self._name = name
        self._options = options
        self._tls = tls
        self._files = None if tls is None else tls.files()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._lock = threading.Lock()

    def start(
        self,
        host: str,
        port: int,
        setting: str,
        handlers: Mapping[str, Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]],
    ) -> None:
        """Listen, and serve from then on.

        Raises:
            ConfigError: the address cannot be bound; the message names `setting`.
        """
        ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        where = join_host(host, port)
        if self._files is not None:
            self._files.watch()
        self._thread = threading.Thread(target=self._run, args=(where, handlers, ready), name=self._name, daemon=True)
        self._thread.start()
        try:
            self.port = ready.result()
        except BaseException as error:
            self._ended(self._thread)
            self._thread = None
            if isinstance(error, OSError):
                why = _why_not_bound(host, port)
                raise ConfigError(f"{setting}={where!r} cannot be bound: {why}") from None
            raise

    def post(self, work: Callable[[], object]) -> bool:
        """Run `work` on the loop soon. False if the server is not running."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(work)
        except RuntimeError:  # closed meanwhile
            return False
        return True

    def submit(self, work: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        """Run `work` on the loop soon, unless the future is cancelled first; RuntimeError in it: not running."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                done.set_exception(error)

        if not self.post(run):
            done.set_exception(RuntimeError(f"{self._name} is not running"))
        return done

    def call(self, work: Callable[[], _T], timeout_s: float) -> _T:
        """Run `work` on the loop and return its result. Raises TimeoutError, or RuntimeError if not running."""
        return self.submit(work).result(timeout_s)

    def on_loop(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.current_thread() is self._thread

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Stop serving, end all streams, join the thread. Idempotent; safe from any thread but the loop's own."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        stop = self._stop
        if stop is not None:
            self.post(stop.set)
        self._ended(thread, timeout_s)
        if thread.is_alive():
            _log.warning("%s did not end within %.1f s", self._name, timeout_s)

    def _ended(self, thread: threading.Thread, timeout_s: float | None = None) -> None:
        thread.join(timeout_s)
        if self._files is not None:
            self._files.unwatch()

    def _run(
        self,
        where: str,
        handlers: Mapping[str, Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]],
        ready: concurrent.futures.Future[int],
    ) -> None:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(_on_loop_error)
        try:
            loop.run_until_complete(self._serve(where, handlers, ready))
        except BaseException as error:  # noqa: BLE001 - reported by start(), or logged
            if not ready.done():
                ready.set_exception(error)
            else:
                _log.exception("%s failed", self._name)
        finally:
            self._loop = None
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            with contextlib.suppress(Exception):
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
                loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _serve(
        self,
        where: str,
        handlers: Mapping[str, Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]],
        ready: concurrent.futures.Future[int],
    ) -> None:
        server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=MAX_RPCS)
        for service, methods in handlers.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(methods)),))
        try:
            if self._tls is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, server_credentials(self._tls))
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError("cannot be bound")
        self._stop = asyncio.Event()
        await server.start()
        self._loop = asyncio.get_running_loop()
        ready.set_result(port)
        await self._stop.wait()
        await server.stop(None)
        # gRPC's own tasks end by themselves now; cancelling them makes it print tracebacks.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=STOP_S)


def _why_not_bound(host: str, port: int) -> str:
    """What keeps a server from listening there, and what to do (gRPC does not say): found by trying it."""
    elsewhere = "use an address of this machine, or [::] for all of them"
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"the host name {host!r} cannot be resolved ({error.strerror}); {elsewhere}"
    for family, kind, proto, _, where in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use by another process; stop that one, or use another port (0: any free one)"
            if error.errno == errno.EADDRNOTAVAIL:
                return f"{host} is not an address of this machine; {elsewhere}"
            if error.errno == errno.EACCES:
                return f"this user may not listen on port {port}; use one above 1023 (0: any free one)"
            return f"{error.strerror}; {elsewhere}"
    return "the port was in use by another process a moment ago; try again, or use another port (0: any free one)"


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio has one wake-up pipe per process: with several loops each is woken for the others' events, and finds the
    # pipe empty, or an event of a loop that has been closed. Harmless, and frequent where a test runs a lighthouse and
    # group servers in one process.
    of_grpc = "PollerCompletionQueue" in repr(context.get("handle"))
    if of_grpc and isinstance(context.get("exception"), (BlockingIOError, RuntimeError)):
        return
    loop.default_exception_handler(context)
