"""Tries the lighthouse, and the certificates, from this host. Collects facts; decides nothing.

Invariants: every connection is bounded by a limit below; a probe sends at most an HTTP/2 preface (what every client of
the lighthouse sends first) and, if that is answered as gRPC does, one Status call, which changes nothing.
"""

from __future__ import annotations

import hashlib
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ft_core.addresses import STANDBY, Addresses
from ft_core.certificates import Tls
from ft_core.control.lighthouse.client import LighthouseClient
from ft_core.doctor.facts import TEXT_MAX, LighthouseFacts, TlsFacts
from ft_core.doctor.greetings import is_grpc
from ft_core.errors import ConfigError, FaultToleranceError
from ft_core.rpc.channel import check_schemes
from ft_core.settings import DEFAULT_ROOM, parse_address
from ft_core.tls_diagnosis import speaks_tls

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_S = 2.0
GREETING_S = 0.5
"""How long a server may take to say something, unasked and then asked."""
CALL_S = 2.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""How a client of HTTP/2 begins, and an empty SETTINGS frame."""
GREETING_MAX = 64
DAY_S = 86400.0


def lighthouses(env: Mapping[str, str]) -> list[LighthouseFacts]:
    """What is where FT_LIGHTHOUSE says: of one, or of each of two."""
    named = env.get("FT_LIGHTHOUSE") or env.get("TORCHFT_LIGHTHOUSE") or ""
    if not named:
        return [LighthouseFacts()]
    try:
        tls = Tls.from_env(env)
        addresses = Addresses.parse(named, "FT_LIGHTHOUSE")
        check_schemes(addresses, tls)
    except ConfigError as error:
        return [LighthouseFacts(named, error=str(error)[:TEXT_MAX])]
    return [_look(one, env, tls) for one in addresses.all]


def _look(address: str, env: Mapping[str, str], tls: Tls | None) -> LighthouseFacts:
    facts = LighthouseFacts(address)
    host, port = parse_address(address, "FT_LIGHTHOUSE")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        facts.connect = f"the name {host!r} cannot be resolved ({error})"
        return facts
    facts.resolves = list(dict.fromkeys(str(where[0]) for *_, where in found))
    facts.connect, greeting = _greeting(host, port)
    facts.greeting = greeting.decode("latin-1")
    if facts.connect:
        return facts
    facts.tls = not is_grpc(facts.greeting) and bool(speaks_tls(host, port))
    if facts.tls or is_grpc(facts.greeting):
        _ask(facts, env, tls)
    return facts


def _greeting(host: str, port: int) -> tuple[str, bytes]:
    """Why there is no connection, or ''; and what the other side says first."""
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            connection.settimeout(GREETING_S)
            for first in (b"", PREFACE):
                try:
                    if first:
                        connection.sendall(first)
                    if found := connection.recv(GREETING_MAX):
                        return "", found
                    return "", b""
                except TimeoutError:
                    continue
                except OSError:  # it has ended the connection
                    return "", b""
            return "", b""
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s: a firewall drops what is sent there, or the host is not there", b""
    except OSError as error:
        return f"{error.strerror or error}", b""


def _ask(facts: LighthouseFacts, env: Mapping[str, str], tls: Tls | None) -> None:
    begin = time.monotonic()
    try:
        client = LighthouseClient(
            facts.address, timedelta(seconds=CALL_S), token=env.get("FT_TOKEN", ""), tls=tls
        )  # fmt: skip
    except FaultToleranceError as error:
        facts.call = str(error).removeprefix(f"addr={facts.address!r}: ")[:TEXT_MAX]
        facts.stands_by = STANDBY in facts.call
        return
    try:
        begin = time.monotonic()
        answer = client.status(timedelta(seconds=CALL_S))
    except FaultToleranceError as error:
        facts.call = str(error)[:TEXT_MAX]
        return
    finally:
        client.close()
    facts.round_trip_s = time.monotonic() - begin
    facts.release = answer.release
    for room in answer.rooms:
        if room.room == DEFAULT_ROOM:
            facts.closed, facts.members = room.closed[:TEXT_MAX], room.member_count


def certificates(env: Mapping[str, str], address: str) -> TlsFacts:
    """Whether the certificates work, under the address that is advertised."""
    try:
        tls = Tls.from_env(env)
        if tls is None:
            return TlsFacts()
        loaded = tls.check_serves("this host's state would travel").files().look()
    except ConfigError as error:
        return TlsFacts(configured=True, error=str(error)[:TEXT_MAX])
    return TlsFacts(
        configured=True, trusts=hashlib.sha256(loaded.trusted).hexdigest()[:16], mutual=tls.mutual,
        covers=loaded.misnamed(address) if address else "", days_left=(loaded.expires - time.time()) / DAY_S,
        soon=time.time() > loaded.soon,
    )  # fmt: skip
