"""prometheus_client's WSGI server with limits: so many requests at once, so long each, and an end.

How it works. The library's server makes a daemon thread for each request, without a limit and without a time limit.
Here a request that finds no place is closed, a connection on which nothing moves times out, `end_late` ends those that
have been open for too long (one that sends a byte now and then never times out), and `server_close` all. With
certificates each request's thread shakes hands first, within the same limits, with those that are in force then.

Imports prometheus_client: nobody imports this before somebody wants metrics. Threads: `process_request`, `end_late` and
`server_close` are the accepting thread's; each request has its own.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer

if TYPE_CHECKING:
    from ft_core.certificates import CertificateFiles


class _Handler(WSGIRequestHandler):
    """Logs nothing: a scrape every second is no news, and one that was given up neither."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def get_stderr(self) -> Any:
        """Nowhere."""
        return _Nowhere()


class _Nowhere:
    def write(self, _: str) -> int:
        return 0

    def flush(self) -> None:
        pass


class Server(ThreadingWSGIServer):
    """One listening socket, and its requests."""

    allow_reuse_address = True
    allow_reuse_port = False
    """Also where a newer Python's library would share ports: two processes would each get some of the scrapes."""
    request_queue_size = 16
    requests_max = 1
    request_s = 1.0
    files: CertificateFiles | None = None

    def server_bind(self) -> None:
        """Bind, and look no name up: that may take seconds, and nobody needs it."""
        self._places = threading.Semaphore(self.requests_max)
        self._open: dict[socket.socket, float] = {}
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()
        self.socket.setblocking(False)  # a connection may have gone between select and accept

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            request = self._encrypted(request)
            self._open[request] = time.monotonic()
            super().process_request(request, client_address)
        except BaseException:
            self._gone(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The request's thread."""
        try:
            if self.files is not None and not self._shakes_hands(request):
                return
            super().process_request_thread(request, client_address)
        finally:
            self._gone(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that went away or was too slow: its own business."""

    def end_late(self, before: float) -> None:
        """End the connections that were opened before this time (monotonic), and with them their threads."""
        for request, since in self._open.copy().items():
            if since < before:
                with contextlib.suppress(OSError):  # it has ended by itself
                    socket.socket.shutdown(request, socket.SHUT_RDWR)  # a TLS socket's own would forget its keys

    def server_close(self) -> None:
        """Stop listening, and end the connections that are open."""
        super().server_close()
        self.end_late(float("inf"))

    def _encrypted(self, request: Any) -> Any:
        """What TLS is spoken over, if it is; nothing is sent or awaited yet."""
        return request if self.files is None else self.files.encrypt(request)

    def _shakes_hands(self, request: Any) -> bool:
        """Who refuses the certificate, or has none to show, has gone then."""
        try:
            request.settimeout(self.request_s)
            request.do_handshake()
        except OSError:
            self.shutdown_request(request)
            return False
        return True

    def _gone(self, request: Any) -> None:
        self._open.pop(request, None)
        self._places.release()


def serve(
    host: str, port: int, application: Callable[..., Any], requests_max: int, request_s: float,
    files: CertificateFiles | None = None,
) -> Server:  # fmt: skip
    """A server that listens; `handle_request` takes the next one. Raises OSError if the address cannot be bound."""
    family, *_, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    limits = {"address_family": family, "requests_max": requests_max, "request_s": request_s, "files": files}
    handler = type("Handler", (_Handler,), {"timeout": request_s})
    made: Any = make_server(str(where[0]), port, application, type("Server", (Server,), limits), handler)
    assert isinstance(made, Server)
    return made
