"""`MetricsServer`: serves a page on a port of its own, on one daemon thread, with prometheus_client's WSGI server.

How it works. The thread binds the port, accepts, and in between counts what has come. Each request has a thread, of
which there are REQUESTS_MAX: a scraper that reads or sends slowly occupies one for little more than REQUEST_S, and
whoever comes when all are occupied is sent away. Of many scrapers ACCEPTS_MAX a second are taken, so that answering
them costs a training thread no share of the interpreter that it could feel; the others wait in the kernel. A port in
use is tried again every RETRY_S: the process before this one may not have gone yet. After PATIENCE_S that is one
warning, and it is still tried. Who may read is `admission`'s: certificates are looked at by a thread of theirs.

Invariants: nothing here is waited for by a thread that trains; `close` ends all threads, takes CLOSE_S at most, and is
idempotent; forked children hold none of its sockets. Threads: `start` and `close` from any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError
from ft_core.metrics.admission import Admission
from ft_core.metrics.exposition import Page, missing
from ft_core.metrics.metrics import DRAIN_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.certificates import CertificateFiles
    from ft_core.metrics.http_server import Server
    from ft_core.metrics.metrics import Metrics

REQUESTS_MAX = 4
"""Requests that are answered at the same time."""
REQUEST_S = 10.0
"""How long a request may take to be sent, and its answer to be read, before the connection is closed."""
ACCEPTS_MAX = 10
"""Connections that are taken per second."""
RETRY_S = 0.5
PATIENCE_S = 10.0
"""How long a port may be in use before that is a warning: a process that held gigabytes lets go of it late."""
CLOSE_S = 2.0

_log = logging.getLogger("ft_core")


def metrics_address(text: str, setting: str) -> tuple[str, int]:
    """Split HOST:PORT (port 0: any free one; no host: all addresses). Raises ConfigError, naming the setting."""
    host, separator, port = text.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ConfigError(
            f"{setting}={text!r}: expected HOST:PORT to serve metrics at, for example 127.0.0.1:9300 or 0.0.0.0:9300 "
            "(port 0: any free one)"
        )
    return host.strip("[]"), int(port)


def checked_address(text: str, setting: str, admission: Admission) -> tuple[str, int]:
    """As `metrics_address`; also a ConfigError if anybody could read there, and that is not meant so."""
    host, port = metrics_address(text, setting)
    admission.check(host, f"{_named(setting)}{text}")
    return host, port


def _named(setting: str) -> str:
    """A setting, as its value follows it."""
    return f"{setting} " if setting.startswith("--") else f"{setting}="


class MetricsServer:
    """Serves one page. Raises ConfigError: the address is none, or anybody could read there.

    Args:
        page: what to serve.
        address: HOST:PORT; '': it is counted, and nobody is served here.
        who: whose metrics these are, for the log.
        setting: what named the address, for errors and warnings.
        admission: who may read, where other machines reach the address.
    """

    def __init__(self, page: Page, address: str, who: str, setting: str, admission: Admission | None = None) -> None:
        self.page = page
        self.url = ""
        """Where it is served, once the port is bound."""
        self.bound = threading.Event()
        self._admission = Admission() if admission is None else admission
        self._address = checked_address(address, setting, self._admission) if address else None
        self._who, self._setting = who, setting
        self._files: CertificateFiles | None = None
        """Watched, from the time when the port is bound."""
        self._server: Server | None = None
        self._stopping = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"ft-metrics-{who}", daemon=True)

    def __repr__(self) -> str:
        return f"MetricsServer({self._who}, {self.url or 'not bound'})"

    def start(self, *, must_bind: bool = False) -> None:
        """Serve from now on. `must_bind`: raise ConfigError if the port cannot be bound now."""
        self._wake, self._woken = socket.socketpair()
        if must_bind and self._address is not None:
            try:
                self._bind()
            except OSError as error:
                self._close_sockets()
                raise ConfigError(self._why(error)) from None
        _live.add(self)
        self._thread.start()

    def close(self) -> None:
        """End it: no thread and no socket is left. Idempotent."""
        self._stopping = True
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._wake.send(b"x")
            self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - logged
            _log.exception(
                "%s: a mistake of ours (please report it): metrics are served no more; the rest goes on without them",
                self._who,
            )  # fmt: skip
        finally:
            self._close_sockets()

    def _serve(self) -> None:
        now = began = second = time.monotonic()
        listens, taken = False, 0
        with selectors.DefaultSelector() as end, selectors.DefaultSelector() as end_or_request:
            for selector in (end, end_or_request):
                selector.register(self._woken, selectors.EVENT_READ)
            while not self._stopping:
                wait_s = DRAIN_S
                if self._address is not None and not listens:
                    listens = self._server is not None or self._tries(now - began)
                    wait_s = DRAIN_S if listens else RETRY_S
                    if self._server is not None:
                        end_or_request.register(self._server, selectors.EVENT_READ)
                if now >= second + 1.0:
                    second, taken = now, 0
                full = taken >= ACCEPTS_MAX
                for key, _ in end.select(second + 1.0 - now) if full else end_or_request.select(wait_s):
                    if key.fileobj is self._server and self._server is not None:
                        taken += 1  # also one that fails, as without a free descriptor: it would be tried at once again
                        self._server.handle_request()  # hands it to a thread
                now = time.monotonic()
                if self._server is not None:
                    self._server.end_late(now - REQUEST_S)
                self.page.drain()

    def _tries(self, since_s: float) -> bool:
        """Try to bind the port. Returns whether that was done."""
        try:
            self._bind()
        except OSError as error:
            if since_s >= PATIENCE_S and not self._warned:
                self._warned = True
                _log.warning("%s: %s; training goes on without them", self._who, self._why(error))
            return False
        return True

    def _bind(self) -> None:
        from ft_core.metrics.http_server import serve

        assert self._address is not None
        host, port = self._address
        tls = self._admission.certificates(host)
        files = None if tls is None else tls.files()
        guarded = self._admission.guard(host, self.page.application())
        server = serve(host, port, guarded, REQUESTS_MAX, REQUEST_S, files)
        if files is not None:
            try:
                files.watch()
            except BaseException:
                server.server_close()
                raise
        self._server, self._files = server, files
        host = host or "0.0.0.0"
        scheme = "http" if files is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"
        _log.info("%s: metrics at %s", self._who, self.url)
        self.bound.set()

    def _why(self, error: OSError) -> str:
        assert self._address is not None
        host, port = self._address
        where = f"{f'[{host}]' if ':' in host else host}:{port}"
        why = error.strerror or str(error)
        where = _named(self._setting) + where
        return f"{where}: metrics cannot be served there: {why}; name another address (port 0: any free one)"

    def _close_sockets(self) -> None:
        server, self._server = self._server, None
        files, self._files = self._files, None
        if server is not None:
            server.server_close()
        if files is not None:
            files.unwatch()
        self._wake.close()
        self._woken.close()

    def _let_go(self) -> None:
        """In a forked child: its parent's port must be free when its parent has gone."""
        server, self._stopping = self._server, True
        if server is not None:
            with contextlib.suppress(OSError):
                os.close(server.socket.detach())


def open_page(shown: Sequence[Metrics]) -> Page | None:
    """What to serve. None: prometheus_client is not installed, which is logged, once in a process."""
    global _told
    if not missing():
        return Page(shown)
    if not _told:
        _told = True
        _log.warning("%s", missing())
    return None


_told = False
_live: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _forked() -> None:
    for server in list(_live):
        server._let_go()


os.register_at_fork(after_in_child=_forked)
