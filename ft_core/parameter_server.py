"""A parameter server over process groups that can fail: each client is in a group of two with the server.

How it works. A client asks the server by HTTP for a session, and is told where in the server's c10d store the two of
them meet. Both configure a new group there, the server as rank 0, the client as rank 1, and the server calls `forward`
with it, on a thread of its own. When `forward` returns or raises, the server's end of the group is shut down, so that
the client's collectives fail instead of waiting, and it opens a new session. Nothing of one session outlives it.

With FT_TOKEN set, a session is given only to those who know it, and with FT_TLS_* it is asked for over TLS; other
machines are listened to only with one of them. The group's own connections know neither, and Gloo
ends the process that receives more bytes than its tensor has: clients are trusted, as the ranks of a job are.
Threads: one accepts, one per connection, which also serves its session. Invariant: at most MAX_SESSIONS sessions at a
time, and MAX_ASKING connections that have none.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import urllib.error
import urllib.request
import uuid
from abc import ABC, abstractmethod
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from ft_core.access import asks_nothing, check_listener, insecure, job_token
from ft_core.certificates import CertificateFiles, Tls
from ft_core.checkpointing.http import auth
from ft_core.errors import CollectiveError, ConfigError
from ft_core.network import advertised_host
from ft_core.process_group import ProcessGroup, open_store
from ft_core.rpc.channel import check_scheme

__all__ = ["ParameterServer"]

log = logging.getLogger("ft_core")
MAX_SESSIONS = 256
"""Clients at a time; the next one is told to come back."""
MAX_ASKING = 64
"""Connections at a time that have no session yet; the next one is closed."""
ASK_S = 60.0
"""How long a client waits for the server's answer."""
REQUEST_S = 10.0
"""How long somebody who has connected may be silent, keys included."""
PATH = "/new_session"
MAX_ANSWER_BYTES = 1 << 16


class ParameterServer(ABC):
    """Serves `forward` to every client that opens a session. The constructor starts it.

    Args:
        port: to listen on for new sessions; 0: any free one.
        store_port: of the c10d store in which groups form; 0: any free one.
        hostname: what clients reach this machine by; None: FT_HOSTNAME, FT_INTERFACE, else the address of the default
            route, or 127.0.0.1 if there is neither a token nor certificates with a CA.

    Raises:
        ConfigError: a port is taken, or the host is not this machine.
    """

    def __init__(self, port: int, store_port: int = 0, *, hostname: str | None = None) -> None:
        self._token, trusts_all = job_token(os.environ), insecure(os.environ)
        self._tls = Tls.from_env(os.environ)
        named, interface = hostname or os.environ.get("FT_HOSTNAME"), os.environ.get("FT_INTERFACE")
        if not (named or interface) and asks_nothing(self._token, self._tls, trusts_all):
            named = "127.0.0.1"
        self._host = advertised_host(named, interface)
        check_listener(
            f"hostname={self._host!r}: a parameter server", self._host, self._token, self._tls,
            "whoever reaches it may open sessions", trusts_all,
        )  # fmt: skip
        if self._tls is not None:
            self._tls.check_serves("sessions would be given out").check_names(self._host)
        self._lock = threading.Lock()
        self._groups: dict[str, ProcessGroup] = {}
        """Of the sessions that are open."""
        self._closed = False
        try:
            self._server = _Server((self._host, port), self, None if self._tls is None else self._tls.files())
        except OSError as error:
            raise ConfigError(f"port={port}: cannot listen on {self._host}: {error}; name another one, or 0") from None
        try:
            self.store = open_store(self._host, port=store_port)
        except Exception as error:
            self._server.server_close()
            raise ConfigError(
                f"store_port={store_port}: no store can listen on {self._host}: {error}; name another one, or 0"
            ) from error
        threading.Thread(target=self._server.serve_forever, name="ft-parameter-server", daemon=True).start()
        log.info("a parameter server listens at %s", self.address())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address()}, {len(self._groups)} sessions)"

    def address(self) -> str:
        """http://host:port/new_session (with certificates https://), for `new_session`."""
        return f"http{'s' if self._tls else ''}://{_bracketed(self._host)}:{self._server.server_address[1]}{PATH}"

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """A new group that is not configured: for the server's end, and the client's."""

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one session, on a thread of its own: loop here for several operations.

        Args:
            session_id: unlike any other.
            pg: of the server (rank 0) and the client (rank 1). It is shut down when this returns or raises.
        """

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Open a session at a server's `address()`. Returns the group: this client is rank 1, the server rank 0.

        Shut the group down when it is no longer needed.

        Raises:
            ConfigError: certificates are set on one side only.
            CollectiveError: the server is not there, refuses, or the group did not form.
        """
        request = urllib.request.Request(address)
        token, tls = job_token(os.environ), Tls.from_env(os.environ)
        if tls is not None and not address.startswith("https:"):
            raise ConfigError(
                f"{address!r} does not use TLS, and FT_TLS_* are set here: set them there too, or unset them here"
            )
        check_scheme(address, "address", tls)
        if token:
            request.add_header("Authorization", auth.sign(token, "GET", urlsplit(address).path))
        try:
            context = None if tls is None else tls.files().look().client
            handlers = urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({})  # no proxy
            opener = urllib.request.build_opener(_NoWayOn, *handlers)
            with opener.open(request, timeout=ASK_S) as answer:
                session = json.loads(answer.read(MAX_ANSWER_BYTES))
            where, session_id = str(session["store_addr"]), str(session["session_id"])
        except (OSError, ValueError, KeyError, TypeError) as error:  # urllib's own errors are OSErrors
            raise CollectiveError(f"no session at {address!r}: {error}") from error
        pg = cls.new_process_group()
        try:
            pg.configure(where, replica_id=session_id, rank=1, world_size=2)
        except BaseException:
            pg.shutdown()
            raise
        return pg

    def shutdown(self) -> None:
        """End all sessions and stop listening. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
            groups = list(self._groups.values())
        if closed:
            return
        self._server.shutdown()
        self._server.server_close()
        for group in groups:
            group.shutdown()

    def _admit(self) -> tuple[str, ProcessGroup] | None:
        """A new session, unless there are too many."""
        session_id, group = str(uuid.uuid4()), self.new_process_group()
        with self._lock:
            if not self._closed and len(self._groups) < MAX_SESSIONS:
                self._groups[session_id] = group
                return session_id, group
        group.shutdown()
        return None

    def _store_address(self, session_id: str) -> str:
        return f"{_bracketed(self._host)}:{self.store.port}/session/{session_id}"

    def _serve(self, session_id: str, group: ProcessGroup) -> None:
        try:
            group.configure(self._store_address(session_id), replica_id=session_id, rank=0, world_size=2)
            self.forward(session_id, group)
        except Exception as error:
            if self._closed:
                log.info("session %s ended with the parameter server: %s", session_id, error)
            else:
                log.exception("session %s failed; its client has to open another one", session_id)
        finally:
            with self._lock:
                del self._groups[session_id]
            group.shutdown()

    def _allows(self, header: str | None) -> bool:
        return not self._token or auth.verify(self._token, "GET", PATH, header)


class _NoWayOn(urllib.request.HTTPRedirectHandler):
    """Whoever answers for the server does not send its clients elsewhere, and their proof of the token with them."""

    def redirect_request(self, *_: object) -> None:
        """None: a redirect is an error."""


class _Server(ThreadingHTTPServer):
    """Listens for new sessions."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], owner: ParameterServer, files: CertificateFiles | None) -> None:
        self.owner = owner
        self._files = files
        self._lock = threading.Lock()
        self._asking: set[Any] = set()
        """Connections that have no session yet."""
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Handler)
        if files is not None:
            files.watch()

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection; with certificates, keys are agreed on by its own thread, when it reads."""
        plain, where = super().get_request()
        if self._files is None:
            return plain, where
        try:
            return self._files.encrypt(plain), where
        except OSError:
            plain.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread that answers, if there is a place."""
        with self._lock:
            place = len(self._asking) < MAX_ASKING
            if place:
                self._asking.add(request)
        if place:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def answered(self, request: Any) -> None:
        """It has its session, or has gone."""
        with self._lock:
            self._asking.discard(request)

    def shutdown_request(self, request: Any) -> None:
        """Hang up."""
        self.answered(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening."""
        super().server_close()
        if self._files is not None:
            self._files.unwatch()
            self._files = None


class _Handler(BaseHTTPRequestHandler):
    """One request, then the session on the same thread."""

    timeout = REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        """Answer, hang up, and serve the session."""
        owner = self.server.owner
        if self.path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"only {PATH} is served here")
            return
        if not owner._allows(self.headers.get("Authorization")):
            self.send_error(HTTPStatus.UNAUTHORIZED, "the token differs (FT_TOKEN)")
            return
        admitted = owner._admit()
        if admitted is None:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_SESSIONS} sessions are open, or the server ends")
            return
        session_id, group = admitted
        told = {"session_id": session_id, "store_addr": owner._store_address(session_id)}
        body = json.dumps(told).encode() + b"\n"
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
        except OSError as error:  # it has gone: the group will not form, and says so
            log.info("session %s: the client went before it was answered: %s", session_id, error)
        self.close_connection = True
        self.server.answered(self.request)
        owner._serve(session_id, group)

    def log_message(self, format: str, *args: object) -> None:
        """To the library's log instead of the terminal."""
        log.debug("parameter server: %s", format % args)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
