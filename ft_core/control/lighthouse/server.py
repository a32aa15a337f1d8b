"""The lighthouse on a thread: address, settings, start and end. Imports neither torch nor anything heavy.

How it works. `room_host.Rooms` keeps leases and rooms, `unary_calls.Calls` answers the unary calls,
`loop_server.LoopServer` runs both on one event loop in one thread. `LighthouseServer` puts them together, for the
command line (`cli`), for tests and for embedding.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from typing import TYPE_CHECKING

from ft_core.access import (
    Tokens,
    asks_nothing,
    check_listener,
    job_token,
    open_to_all,
    own_admin_token,
)
from ft_core.access import insecure as trusts_all
from ft_core.control.lighthouse.dashboards import LighthouseDashboard
from ft_core.control.lighthouse.partner_link import PartnerLink
from ft_core.control.lighthouse.room_host import Rooms
from ft_core.control.lighthouse.room_samples import RoomSamples
from ft_core.control.lighthouse.unary_calls import Calls
from ft_core.errors import ConfigError
from ft_core.events.event_log import open_events
from ft_core.events.schema import LIGHTHOUSE as ROLE
from ft_core.events.schema import VARIABLE
from ft_core.metrics.admission import Admission
from ft_core.metrics.metrics import Metrics, beside
from ft_core.metrics.server import MetricsServer, checked_address, open_page
from ft_core.rpc.channel import (
    LIGHTHOUSE,
    Tls,
    check_scheme,
    grpc,
    join_host,
    reachable_host,
    release,
    server_options,
    split_bind,
    target,
)
from ft_core.rpc.loop_server import LoopServer
from ft_core.settings import LighthouseSettings

if TYPE_CHECKING:
    from ft_core.events.event_log import Events
    from ft_core.metrics.exposition import Page

DEFAULT_LIVENESS_S = 1.0
DEFAULT_BOOT_WINDOW_MS = 500
DANGER = "whoever reaches this address may stop the job or take it over"
EVERYBODY, HERE = "[::]:0", "localhost:0"

_log = logging.getLogger("ft_core.lighthouse")


class LighthouseServer:
    """A lighthouse on a thread of its own. The constructor starts it.

    Args:
        bind: host:port to listen on; port 0 takes any free one. What other machines can reach needs a token, or
            certificates that clients have to show. None: any port, for other machines only if there is either.
        min_replicas: smallest quorum.
        join_timeout_ms: how long a forming quorum waits for replicas that are connected but have not asked.
        quorum_tick_ms: accepted for compatibility and unused: nothing here polls.
        heartbeat_timeout_ms: how long a client of the unary calls is believed alive after its last call.
        liveness_ms: unanswered keepalives for this long end a lease; None: FT_LIVENESS_S, else 1000.
        grace_ms: a closed lease that is not re-opened within this time is a death.
        boot_window_ms: how long after its start the lighthouse waits for groups that were running before it (R9);
            None: 500, but not at all on a port that the system chose (port 0), which nobody can have known.
        token: secret every call must carry; None: FT_TOKEN.
        admin_token: secret that orders to drain and kill must carry; None: FT_ADMIN_TOKEN; '': the token.
        tls: certificates; None: FT_TLS_CERT, FT_TLS_KEY, FT_TLS_CA.
        insecure: anybody who reaches the address may take part, stop the job, or take it over, and that is meant so
            (FT_INSECURE=1 says so, too).
        one_job: it ends with its job: what that has committed is not forgotten when its scripts have ended (R21).
        events: folder of the job's event files (docs/events.md); None: FT_EVENTS; '': none are written.
        metrics: host:port to serve metrics for Prometheus at (docs/metrics.md), for other machines as `bind`; '': they
            are counted, for `metrics_page`; None: they are not.
        http: host:port of the dashboard (docs/dashboard.md), or '': none. 'auto': on this machine only, on its usual
            port or a free one; if that cannot be, there is none, and `http_line` says why.
        peer: host:port of the other lighthouse of a pair, which is started with this one's address: one of the two
            serves, the other takes its place when it is gone (docs/high-availability.md); '': this one is alone.

    Raises:
        ConfigError: a value cannot work, or the address cannot be bound.
    """

    metrics: Metrics | None = None
    """What is counted for Prometheus; None: nothing is."""
    metrics_page: Page | None = None
    """Its `render` may be called from any thread; None: nothing is counted."""
    _metrics_server: MetricsServer | None = None

    def __init__(
        self,
        bind: str | None = None,
        min_replicas: int = 1,
        join_timeout_ms: int = 100,
        quorum_tick_ms: int = 100,  # noqa: ARG002
        heartbeat_timeout_ms: int = 5000,
        *,
        liveness_ms: int | None = None,
        grace_ms: int = 100,
        boot_window_ms: int | None = None,
        token: str | None = None,
        admin_token: str | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        one_job: bool = False,
        events: str | None = None,
        metrics: str | None = None,
        http: str = "",
        peer: str = "",
    ) -> None:
        token = job_token(os.environ) if token is None else token
        tls = tls or Tls.from_env(os.environ)
        insecure = insecure or trusts_all(os.environ)
        host, port = _place(bind, token, tls, insecure)
        _check_peer(peer, host, port, tls)
        self._dashboard = LighthouseDashboard(http)
        unknown = boot_window_ms is None and port == 0
        boot_window_ms = DEFAULT_BOOT_WINDOW_MS if boot_window_ms is None else boot_window_ms
        _check_waits(
            join_timeout_ms=join_timeout_ms, heartbeat_timeout_ms=heartbeat_timeout_ms, grace_ms=grace_ms,
            boot_window_ms=boot_window_ms,
        )  # fmt: skip
        settings = LighthouseSettings(
            min_replicas=min_replicas, join_timeout_s=join_timeout_ms / 1000,
            heartbeat_timeout_s=heartbeat_timeout_ms / 1000, boot_window_s=boot_window_ms / 1000,
            grace_s=grace_ms / 1000, token=token,
            admin_token=own_admin_token(os.environ) if admin_token is None else admin_token, one_job=one_job,
        )  # fmt: skip
        settings.check()
        tokens = Tokens(settings.token, settings.admin_token).check()
        liveness_s, liveness = _liveness(liveness_ms)
        if settings.grace_s > liveness_s:
            raise ConfigError(f"grace_ms={grace_ms} must not be above {liveness}")
        self._scheme = "http" if tls is None else "https"
        self._host = reachable_host(host)
        self._server = LoopServer("ft-lighthouse", server_options(liveness_s), tls)
        log = self._dashboard.sees(self._open_log(events, metrics, Admission(tokens, tls, insecure)))
        self._rooms = Rooms(settings, liveness_s, unknown, log)
        self._partner = PartnerLink(self._rooms, peer, tls, tokens.job, log) if peer else None
        self._rooms.partner = self._partner
        self._calls = Calls(self._rooms)
        try:
            self._open(host, port, tls, insecure)
        except BaseException:
            self._dashboard.shutdown()
            log.close()
            self._close_metrics()
            raise
        log.emit("lighthouse_started", address=self.address(), min_replicas=min_replicas)

    def __repr__(self) -> str:
        return f"LighthouseServer({self.address()}, {self._rooms!r})"

    def address(self) -> str:
        """http://host:port, with a host that other machines can use where this one's name allows."""
        return f"{self._scheme}://{join_host(self._host, self._server.port)}"

    def http_address(self) -> str:
        """Where the dashboard is; '': there is none."""
        return self._dashboard.address()

    def http_line(self) -> str:
        """Where the dashboard is, or why there is none, for whoever starts this; '': it is switched off."""
        return self._dashboard.line()

    def _open(self, host: str, port: int, tls: Tls | None, insecure: bool) -> None:
        lease: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._rooms.serve)
        self._dashboard.bind(self._rooms, self._server, tls, insecure)
        handlers = {"Lease": lease, **self._calls.handlers()}
        partner = self._partner
        if partner is not None:
            handlers["Partner"] = grpc.stream_stream_rpc_method_handler(partner.serve)
        self._server.start(host, port, "bind", {LIGHTHOUSE: handlers})
        if partner is not None:
            self._server.post(partner.start)
        self._dashboard.start()

    def shutdown(self) -> None:
        """End all leases and stop listening. Idempotent; takes at most a few seconds."""
        self._dashboard.shutdown()
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._server.call(self._close, 1.0)
        self._close_metrics()
        self._server.shutdown()

    def _open_log(self, events: str | None, address: str | None, admission: Admission) -> Events:
        """Where this lighthouse's events go: into a folder, and into the metrics, which are served at an address."""
        if address:
            checked_address(address, "metrics", admission)  # whether or not there is something to serve them with
        metrics = Metrics(ROLE, sampled=RoomSamples(lambda: self._rooms, self._server).look)
        page = open_page([metrics]) if address is not None else None
        if page is not None:
            self.metrics, self.metrics_page = metrics, page
            self._metrics_server = MetricsServer(page, address or "", ROLE, "metrics", admission)
            self._metrics_server.start(must_bind=True)
        folder = os.environ.get(VARIABLE, "") if events is None else events
        return beside(open_events(folder, ROLE, ROLE, release()), self.metrics)

    def _close_metrics(self) -> None:
        if self._metrics_server is not None:
            self._metrics_server.close()

    def _close(self) -> None:
        self._calls.close()
        if self._partner is not None:
            self._partner.close()
        self._rooms.close()


def _place(bind: str | None, token: str, tls: Tls | None, insecure: bool) -> tuple[str, int]:
    """Where to listen. Raises ConfigError if anybody could come in there by mistake, or `tls` is no good."""
    if tls is not None:
        tls.files().look()  # that its files do not work is said before anything listens
    if bind is None:
        bind = HERE if asks_nothing(token, tls, insecure) else EVERYBODY
    host, port = split_bind(bind, "bind")
    check_listener(f"bind={bind}", host, token, tls, DANGER, insecure)
    if open_to_all(host, token, tls):
        _log.info("bind=%s without FT_TOKEN: %s, and that is meant so (insecure, FT_INSECURE)", bind, DANGER)
    return host, port


def _check_peer(peer: str, host: str, port: int, tls: Tls | None) -> None:
    """Raise ConfigError if there cannot be another lighthouse at `peer`, or it could not find this one."""
    if not peer:
        return
    where = target(peer, "peer")
    check_scheme(peer, "peer", tls)
    if port == 0:
        raise ConfigError(f"peer={peer!r}: the other lighthouse has to know this one's port; bind to one that is not 0")
    if where == join_host(host, port):
        raise ConfigError(f"peer={peer!r} is this lighthouse itself; give the address of the other one of the pair")


def _check_waits(**waits: float) -> None:
    for name, value in waits.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}={value} must be a number of milliseconds, 0 or more")


def _liveness(given_ms: int | None) -> tuple[float, str]:
    """Seconds, and how the user wrote them."""
    if given_ms is not None:
        if given_ms <= 0:
            raise ConfigError(f"liveness_ms={given_ms} must be more than 0")
        return given_ms / 1000, f"liveness_ms={given_ms}"
    text = os.environ.get("FT_LIVENESS_S", "")
    try:
        value = float(text) if text else DEFAULT_LIVENESS_S
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise ConfigError(f"FT_LIVENESS_S={text!r} is not a positive number of seconds")
    return value, f"FT_LIVENESS_S={text}" if text else f"liveness_ms={value * 1000:g}"
