"""How both sides talk gRPC: options, credentials, the token, addresses. Shared by lighthouse, client and group server.

What the options are for (measured, see DESIGN):
- Liveness is HTTP/2 keepalive, answered by gRPC's C core without the GIL. For a liveness timeout T the server pings a
  connection on which nothing arrived for 0.5 T, and gives up 0.6 T later: a peer is given up when it has been silent
  for 1.1 T. Renewals arrive every T/4, and every 0.45 T where leases are many, so a connection that carries them is
  hardly ever pinged (a ping costs about half as much as a renewal; 1,000 connections that were pinged between any two
  cost 0.36 of a core instead of 0.28). Without `ping_timeout_ms` a frozen peer is not noticed at all.
- No bandwidth probes (`bdp_probe`): each is a ping for a message that arrives, half of what a renewal costs the server.
  In their place the window in which a big message may be sent is fixed (`WINDOW_BYTES`).
- Clients ping too, lazily (`CLIENT_KEEPALIVE_S`): a lighthouse that froze for a few seconds must not lose anybody, one
  whose host died must be given up some time. The ranks of a group ping their leader as it pings them: while it is
  frozen they wait for it inside the group, which has to end.
- Every attempt to connect uses a channel of its own with its own subchannel pool: gRPC's back-off is shared
  through that pool and would otherwise make a reconnect wait for up to minutes.
- No SO_REUSEPORT (two lighthouses on one port would each get half of the trainers), no HTTP proxy (a proxy from the
  environment is never meant for a trainer's control plane).

Importing this module imports grpc with its logging turned down: gRPC prints a line per fork() otherwise, and DataLoader
workers fork. A GRPC_VERBOSITY of the user's own is left alone.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import socket
from typing import TYPE_CHECKING

from ft_core.access import Tokens, check_token
from ft_core.certificates import Loaded, Tls
from ft_core.errors import ConfigError
from ft_core.rpc.codec import MAX_PUSH_BYTES, MAX_REQUEST_BYTES
from ft_core.settings import check_host, parse_address

_quiet = "GRPC_VERBOSITY" not in os.environ
if _quiet:
    os.environ["GRPC_VERBOSITY"] = "NONE"
import grpc  # noqa: E402
import grpc.aio  # noqa: E402

if TYPE_CHECKING:
    from ft_core.addresses import Addresses

if _quiet:
    del os.environ["GRPC_VERBOSITY"]  # read once at import; the user's child processes keep their own logging

__all__ = [
    "GROUP", "LIGHTHOUSE", "QUORUM_ANSWER_S", "Options", "Tls", "channel_options", "check_scheme", "check_schemes",
    "explain", "grpc", "join_host", "open_channel",
    "reachable_host", "release", "server_credentials", "server_options", "split_bind", "status_of", "target",
    "order_refusal", "token_metadata", "token_refusal",
]  # fmt: skip

TOKEN_KEY = "ft-token"
PINGED_AFTER = 0.5
"""Of the liveness timeout: a peer that was silent for so long is pinged. Longer than the pause between two renewals,
however many leases there are (`protocol/lighthouse/pace.py`)."""
GIVEN_UP_AFTER = 0.6
"""Of the liveness timeout: so long a peer may take to answer a ping."""
CLIENT_KEEPALIVE_S = 3.0
CLIENT_KEEPALIVE_TIMEOUT_S = 9.0
QUORUM_ANSWER_S = 1.0
"""A Quorum call ends this long before its gRPC deadline, so that the reason for not answering still gets there."""
WINDOW_BYTES = 1 << 20
"""How much of a message may be under way unread: a quorum of 1,000 groups at once, also over a slow line."""
CONNECT_ATTEMPT_S = 1.0
"""An attempt to connect gives up after this long; the next one starts afresh (a lost packet costs no more)."""
HANDSHAKE_S = 10.0
"""How long a connection may take until keys and first settings are exchanged; who is silent is sent away then."""
LIGHTHOUSE = "ft_training.v1.Lighthouse"
GROUP = "ft_training.v1.Group"

Options = list[tuple[str, int]]


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials of a server: each new connection gets what the files hold then, as `CertificateFiles` knows it.

    Raises:
        ConfigError: a file is missing or does not work; the message names its variable.
    """
    if not tls.serves:
        raise ConfigError("TLS needs both FT_TLS_CERT and FT_TLS_KEY on a server")
    files = tls.files()
    given = files.now

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before every handshake, on a thread of its own that must not wait for a disk."""
        nonlocal given
        if files.now is given:
            return None
        given = files.now
        return _shown(given)

    # The stubs forget that None means: no change.
    return grpc.dynamic_ssl_server_credentials(_shown(given), changed, tls.mutual)  # type: ignore[arg-type]


def _shown(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca or None)


def _channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    loaded = tls.files().look()
    own = (loaded.key, loaded.cert) if loaded.server is not None else (None, None)
    return grpc.ssl_channel_credentials(loaded.trusted, *own)


def server_options(liveness_s: float) -> Options:
    """Options of a server that ends the streams of peers that are silent for `liveness_s`."""
    ms = max(1, int(liveness_s * 1000))
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.keepalive_time_ms", max(10, int(PINGED_AFTER * ms))),
        ("grpc.keepalive_timeout_ms", max(1, int(GIVEN_UP_AFTER * ms))),
        ("grpc.http2.ping_timeout_ms", max(1, int(GIVEN_UP_AFTER * ms))),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", MAX_PUSH_BYTES),
        ("grpc.max_concurrent_streams", 4096),
    ]


def channel_options(liveness_s: float | None = None) -> Options:
    """Options of a client's channel. `liveness_s`: give up a server that is silent for so long; None: lazily."""
    attempt_ms = int(CONNECT_ATTEMPT_S * 1000)
    time_ms, timeout_ms = int(CLIENT_KEEPALIVE_S * 1000), int(CLIENT_KEEPALIVE_TIMEOUT_S * 1000)
    if liveness_s is not None:
        time_ms, timeout_ms = max(10, int(300 * liveness_s)), max(1, int(800 * liveness_s))
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.min_reconnect_backoff_ms", attempt_ms),
        ("grpc.max_reconnect_backoff_ms", attempt_ms),
        ("grpc.max_receive_message_length", MAX_PUSH_BYTES),
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        ("grpc.enable_retries", 0),
    ]


def target(address: str, setting: str) -> str:
    """The gRPC target of 'host:port' or 'http://host:port'. Raises ConfigError naming `setting`."""
    host, port = parse_address(address, setting)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_scheme(address: str, setting: str, tls: Tls | None) -> None:
    """Raise ConfigError if an address asks for TLS and there are no certificates: the token would travel in clear."""
    if tls is None and address.startswith(("https://", "grpcs://")):
        raise ConfigError(
            f"{setting}={address!r} asks for TLS, and there are no certificates: set FT_TLS_CA, FT_TLS_CERT and "
            "FT_TLS_KEY, or write http://"
        )


def check_schemes(addresses: Addresses, tls: Tls | None) -> None:
    """The same of every address of a list."""
    for address in addresses.all:
        check_scheme(address, addresses.setting, tls)


def open_channel(address: str, setting: str, tls: Tls | None, liveness_s: float | None = None) -> grpc.Channel:
    """A fresh channel; it connects with the first call. `liveness_s`: as `channel_options`. Raises ConfigError."""
    where = target(address, setting)
    check_scheme(address, setting, tls)
    if tls is None:
        return grpc.insecure_channel(where, channel_options(liveness_s))
    return grpc.secure_channel(where, _channel_credentials(tls), channel_options(liveness_s))


def aio_channel(address: str, setting: str, tls: Tls | None, liveness_s: float) -> grpc.aio.Channel:
    """The same for a coroutine, on the loop that it runs on. Raises ConfigError."""
    where = target(address, setting)
    check_scheme(address, setting, tls)
    if tls is None:
        return grpc.aio.insecure_channel(where, channel_options(liveness_s))
    return grpc.aio.secure_channel(where, _channel_credentials(tls), channel_options(liveness_s))


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of every call. Raises ConfigError if the token cannot travel in a header."""
    if not token:
        return ()
    return ((TOKEN_KEY, check_token(token)),)


def _token_in(metadata: object) -> str | bytes | None:
    return next((value for key, value in metadata or () if key == TOKEN_KEY), None)  # type: ignore[attr-defined]


def token_refusal(metadata: object, tokens: Tokens, server: str) -> str:
    """Why a call with this metadata must not be served, or ''."""
    given = _token_in(metadata)
    if tokens.admits(given):
        return ""
    if given is None:
        return f"{server} needs a token: set FT_TOKEN to the value it was started with"
    return f"FT_TOKEN differs from the one {server} was started with"


def order_refusal(metadata: object, tokens: Tokens, server: str) -> str:
    """Why an order to replicas with this metadata must not be carried out, or ''."""
    if tokens.orders(_token_in(metadata)):
        return ""
    if tokens.admin:
        return (
            f"orders to drain or kill need the admin token here: set FT_ADMIN_TOKEN to the value {server} was started "
            "with (FT_TOKEN alone lets a replica train)"
        )
    return "orders to replicas are only taken by a lighthouse that was started with FT_TOKEN or FT_ADMIN_TOKEN"


def status_of(error: grpc.RpcError) -> grpc.StatusCode | None:
    """The status a call ended with. (Errors raised by calls are calls, which the stubs do not know.)"""
    code = getattr(error, "code", None)
    found = code() if code is not None else None
    return found if isinstance(found, grpc.StatusCode) else None


def explain(error: grpc.RpcError) -> str:
    """What went wrong, in the words of gRPC's innermost cause."""
    details = getattr(error, "details", None)
    text = str(details() or "") if details is not None else str(error)
    text = text.rpartition("last error: ")[2].rpartition("Failed to connect to remote host: ")[2].strip()
    code = status_of(error)
    return text or (code.name if code is not None else "unknown error")


@functools.cache
def release() -> str:
    """The installed release of this project."""
    try:
        return importlib.metadata.version("ft-training")
    except importlib.metadata.PackageNotFoundError:
        return "0.1.0+source"


def reachable_host(bind_host: str) -> str:
    """A name others can reach this machine by, given what a server is bound to.

    A wildcard gives the host name if it leads back to this machine, else the loopback address.
    """
    if bind_host not in ("", "::", "0.0.0.0", "*"):
        return bind_host
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, proto, _, where in found:
        if bind_host == "0.0.0.0" and family is not socket.AF_INET:
            continue
        with socket.socket(family, kind, proto) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return name
    return "127.0.0.1"


def split_bind(bind: str, setting: str) -> tuple[str, int]:
    """Split a bind address 'host:port' ('[::]:0': any interface, any port). Raises ConfigError."""
    host, separator, port = bind.removeprefix("http://").rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{setting}={bind!r}: expected host:port, for example [::]:29510 (port 0: any free one)")
    return check_host(host.strip("[]"), f"{setting}={bind!r}"), int(port)


def join_host(host: str, port: int) -> str:
    """host:port, with brackets where IPv6 needs them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
